"""Whole state dicts out of and into models, and files of torch.save and safetensors."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import graphfsdp
from checkpoint_helpers import (
    Setup,
    addresses,
    contents,
    digests,
    load_on_ranks,
    make,
    save_on_ranks,
    train_plainly,
)
from graphfsdp.checkpoint import full_state_dict, load_full_state_dict
from ranks import RankPool

SHARDED = Setup("optim_grads_params", "bf16")
ALONE = Setup(None)


def full_out_and_in(folder: Path) -> list[dict[str, str]]:
    """Gather, write with torch.save, and load what came from one device."""
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 2)
    state = full_state_dict(model, optimizer)
    assert (state == {}) == (dist.get_rank() > 0)
    if state:
        assert state["model"]["head.weight"] is state["model"]["embedding.weight"]
        torch.save(state, folder / "sharded.pt")
    expected = digests(contents(model, optimizer))
    other, its_optimizer = make(SHARDED, seed=1)
    train_plainly(other, its_optimizer, 1)
    before = addresses(other, its_optimizer)
    load_full_state_dict(other, state or None, its_optimizer)
    assert digests(contents(other, its_optimizer)) == expected
    assert addresses(other, its_optimizer) == before
    dist.barrier()
    return [expected]


def full_alone(folder: Path) -> dict[str, str]:
    """Load a file that sharded ranks have written; write one for them."""
    model, optimizer = make(ALONE, seed=1)
    graphfsdp.load(folder / "sharded.pt", model, optimizer)
    state = full_state_dict(model, optimizer)
    torch.save(state, folder / "alone.pt")
    return digests(contents(model, optimizer))


def test_full_state_dicts_go_out_of_and_into_sharded_models(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    expected = ranks2.run(full_out_and_in, tmp_path)[0][0]
    assert ranks1.run(full_alone, tmp_path)[0] == expected
    assert ranks2.run(load_on_ranks, [tmp_path / "alone.pt"], SHARDED) == [[expected]] * 2
    state = torch.load(tmp_path / "sharded.pt", weights_only=True)
    plain, _ = make(ALONE, seed=3)
    plain.load_state_dict(state["model"])  # torch's own way in


def load_weights(path: Path) -> dict[str, str]:
    model, optimizer = make(SHARDED, seed=2)
    graphfsdp.load(path, model)
    return digests(contents(model, optimizer))


def write_safetensors(folder: Path) -> dict[str, str]:
    """Write a sharded model as a file of the package, each tensor once."""
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 1)
    state = full_state_dict(model)
    if state:
        del state["model"]["head.weight"]  # tied to the embedding
        save_file(state["model"], folder / "ours.safetensors")
    dist.barrier()
    return digests(contents(model, optimizer))


def test_files_of_safetensors_keep_every_bit(tmp_path: Path, ranks2: RankPool) -> None:
    expected = ranks2.run(write_safetensors, tmp_path)[0]
    plain, _ = make(ALONE, seed=3)
    graphfsdp.load(tmp_path / "ours.safetensors", plain)
    bits = digests({name: param.detach() for name, param in plain.named_parameters()})
    assert bits == {name: expected[name] for name in bits}
    save_model(plain, str(tmp_path / "theirs.safetensors"))
    for name in ("ours", "theirs"):
        weights = ranks2.run(load_weights, tmp_path / f"{name}.safetensors")[0]
        assert bits == {name: weights[name] for name in bits}


def test_torch_puts_weights_together_without_the_model(tmp_path: Path, ranks2: RankPool) -> None:
    expected = ranks2.run(save_on_ranks, tmp_path, SHARDED)[0]
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000003"))
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in saved.items()
        if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        dcp_load(weights, storage_reader=reader)
    found = digests({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    assert found == {name: expected[name] for name in found}


class Bomb:
    """What a pickle can do to those who load it."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("bang",))


def test_a_file_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1), "extra": Bomb()}, "evil.pt")
    with pytest.raises(graphfsdp.CheckpointError, match="cannot be read as a state dict"):
        graphfsdp.load("evil.pt", nn.Linear(1, 1))
    assert not Path("bang").exists()


def test_a_safetensors_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(nn.Linear(4, 3).state_dict(), path)
    content = path.read_bytes()
    for damaged in (content[:-1], b"\xff" * 8 + content[8:], content[:9] + b"x" + content[10:]):
        path.write_bytes(damaged)
        with pytest.raises(graphfsdp.CheckpointDamagedError, match="cut off or damaged"):
            graphfsdp.load(path, nn.Linear(4, 3))
