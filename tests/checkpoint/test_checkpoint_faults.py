"""What users get wrong when they save, and objects of theirs that fail."""

import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import graphfsdp
from checkpoint_helpers import Setup, make
from kill_saves import model_of
from ranks import RankPool


class Faulty:
    """An object whose state cannot be had on one rank."""

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states

    def state_dict(self) -> dict[str, Any]:
        if not self.num_states:
            raise ValueError("no state at the moment")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_states = len(state)


def fail_in_an_object(path: Path) -> None:
    model, optimizer = make(Setup("optim_grads_params"))
    objects = {"position": Faulty(1 - dist.get_rank())}
    expected, match = (
        (ValueError, "^no state at the moment")
        if dist.get_rank()
        else (graphfsdp.CheckpointError, "rank 1: ValueError: no state at the moment")
    )
    with pytest.raises(expected, match=match):
        graphfsdp.save(path, model, optimizer, objects=objects)
    with (
        graphfsdp.AsyncSaver() as saver,
        pytest.raises(expected, match=match),
    ):
        saver.save(path, model, optimizer, objects=objects)
    graphfsdp.save(path, model, optimizer)  # nobody is left waiting


def test_an_object_that_fails_on_one_rank_ends_the_save_on_all(
    tmp_path: Path, ranks2: RankPool
) -> None:
    ranks2.run(fail_in_an_object, tmp_path)


def test_arguments_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    model, optimizer = model_of(1)
    for step in ("3", 2.0, True, -1):
        with pytest.raises(graphfsdp.ConfigError, match="step must be an integer"):
            graphfsdp.save(tmp_path, model, optimizer, step=step)  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["endless"] = endless
    thing = unittest.mock.Mock(state_dict=lambda: endless)
    with pytest.raises(graphfsdp.CheckpointError, match=r"'thing'. holds itself"):
        graphfsdp.save(tmp_path, model, optimizer, objects={"thing": thing})
    with graphfsdp.AsyncSaver() as saver:
        saver.save(tmp_path, model, optimizer)
    with pytest.raises(graphfsdp.CheckpointError, match="was closed"):
        saver.save(tmp_path, model, optimizer)
