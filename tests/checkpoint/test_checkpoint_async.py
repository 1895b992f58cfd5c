"""Saving in the background: overlap, one consistent moment, errors, memory, objects that fail."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphfsdp
from checkpoint_helpers import Holding, Setup, contents, digests, make, train_plainly
from kill_saves import is_all, model_of, numbers
from ranks import RankPool, on_ranks


def test_training_goes_on_while_one_moment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, original = threading.Event(), os.fsync

    def wait_then_sync(handle: Any) -> None:
        assert may_write.wait(60)
        original(handle)

    monkeypatch.setattr(os, "fsync", wait_then_sync)
    model, optimizer = model_of(1)
    with graphfsdp.AsyncSaver() as saver:
        saver.save(tmp_path, model, optimizer, step=1)
        assert saver.is_saving
        for _ in range(5):  # the state is another one long before it is written
            optimizer.zero_grad()
            model(torch.randn(3, 64)).square().sum().backward()
            optimizer.step()
        assert saver.is_saving
        assert not (tmp_path / "latest").exists()
        may_write.set()
        assert saver.wait() == tmp_path / "step-00000001"
        memory = {tensor.data_ptr() for tensor in saver._memory.values()}
        saver.save(tmp_path, model, optimizer, step=2)
        assert {tensor.data_ptr() for tensor in saver._memory.values()} == memory
    other, its_optimizer = model_of(-1)
    graphfsdp.load(tmp_path, other, its_optimizer, step=1)
    assert is_all(1, other, its_optimizer)
    graphfsdp.load(tmp_path, other, its_optimizer)
    pairs = zip(numbers(model, optimizer), numbers(other, its_optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_failure_in_the_background_is_raised_by_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(handle: Any) -> None:
        raise OSError(28, "No space left on device")

    model, optimizer = model_of(1)
    graphfsdp.save(tmp_path, model, step=1)
    saver = graphfsdp.AsyncSaver()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        saver.save(tmp_path, model, optimizer, step=2)
        with pytest.raises(graphfsdp.CheckpointError, match="No space left on device"):
            saver.wait()
    saver.save(tmp_path, model, optimizer, step=3)
    saver.close()
    with pytest.raises(graphfsdp.CheckpointError, match="was closed"):
        saver.save(tmp_path, model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000003",
    ]


def save_while_training(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    model, optimizer = make(Setup("optim_grads_params", "bf16"))
    train_plainly(model, optimizer, 2)
    expected = digests(contents(model, optimizer))
    with graphfsdp.AsyncSaver() as saver:
        saver.save(path, model, optimizer, step=2)
        train_plainly(model, optimizer, 3)  # collectives of its own, at the same time
        saver.save(path, model, optimizer, step=5)
        train_plainly(model, optimizer, 1)
    assert dist.is_initialized()
    graphfsdp.load(path, model, optimizer, step=2)
    return expected, digests(contents(model, optimizer))


def test_ranks_save_in_the_background_while_they_train(tmp_path: Path, ranks2: RankPool) -> None:
    for expected, got in ranks2.run(save_while_training, tmp_path):
        assert expected == got


class Faulty(Holding):
    def state_dict(self) -> dict[Any, Any]:
        raise ValueError("no state at the moment")


@on_ranks("ranks2")
def test_an_object_that_fails_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    model, optimizer = make(Setup("optim_grads_params"))
    objects = {"position": (Faulty if dist.get_rank() else Holding)({})}
    expected, match = (
        (ValueError, "^no state at the moment")
        if dist.get_rank()
        else (graphfsdp.CheckpointError, "rank 1: ValueError: no state at the moment")
    )
    with pytest.raises(expected, match=match):
        graphfsdp.save(tmp_path, model, optimizer, objects=objects)
    with (
        graphfsdp.AsyncSaver() as saver,
        pytest.raises(expected, match=match),
    ):
        saver.save(tmp_path, model, optimizer, objects=objects)
    graphfsdp.save(tmp_path, model, optimizer)  # nobody is left waiting
