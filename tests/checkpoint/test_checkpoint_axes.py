"""Checkpoints of meshes with two axes: saved there, loaded on one axis or one device, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch

import graphfsdp
from checkpoint_helpers import (
    Setup,
    addresses,
    contents,
    digests,
    load_on_ranks,
    save_on_ranks,
)
from graphfsdp.base.dtensors import local_part
from parallel_models import adam_of, expert_parallel, plain_model, tensor_parallel
from ranks import RankPool

ONE_DEVICE = (1, Setup(None))
ONE_AXIS = (2, Setup("optim_grads_params"))
REPEATED = (4, Setup("optim_grads_params", "bf16", "no_shard"))
CUT_TWICE = (4, Setup("optim_grads_params", "fp32", "optim"))
ZERO_ONE = (4, Setup("optim", "bf16", "optim"))
WAYS = (ONE_DEVICE, ONE_AXIS, REPEATED, CUT_TWICE, ZERO_ONE)
# Each way of loading with those of saving that it meets.
PAIRS = {
    ONE_DEVICE: (REPEATED, CUT_TWICE),
    ONE_AXIS: (CUT_TWICE, ZERO_ONE),
    REPEATED: (CUT_TWICE, ONE_AXIS),
    CUT_TWICE: (ONE_DEVICE, REPEATED),
}


def test_checkpoints_go_between_one_axis_and_two(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool, ranks4: RankPool
) -> None:
    pools = {1: ranks1, 2: ranks2, 4: ranks4}
    paths = {way: tmp_path / str(index) for index, way in enumerate(WAYS)}
    saved = {
        way: pools[way[0]].run(save_on_ranks, paths[way], way[1], limit_s=90)[0] for way in WAYS
    }
    for way, sources in PAIRS.items():
        found = pools[way[0]].run(
            load_on_ranks, [paths[source] for source in sources], way[1], limit_s=90
        )
        for rank, results in enumerate(found):
            for source, got in zip(sources, results, strict=True):
                differing = [name for name, bits in saved[source].items() if got[name] != bits]
                assert not differing, f"rank {rank} of {way}, saved by {source}: {differing}"
                assert got.keys() == saved[source].keys()


def model_of(kind: str) -> Any:
    if kind == "tensor":
        return tensor_parallel(sequence=True)
    if kind == "expert":
        return expert_parallel(outer_strategy="no_shard")
    model = plain_model("feed" if kind.endswith("feed") else "mixture")
    if kind.startswith("one axis"):
        model = graphfsdp.fully_shard(model)
    return model


def stepped(kind: str, num_steps: int, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer after steps along gradients that are its own weights."""
    model = model_of(kind)
    optimizer = adam_of(model)
    with torch.no_grad():
        for param in model.parameters():
            local_part(param).mul_(seed)
    for index in range(num_steps):
        for param in model.parameters():
            if param.requires_grad:
                param.grad = param.detach() * (index + 1)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_kind(path: Path, kind: str) -> dict[str, str]:
    model, optimizer = stepped(kind, 2, 1)
    graphfsdp.save(path, model, optimizer)
    return digests(contents(model, optimizer))


def load_kind(path: Path, kind: str) -> dict[str, str]:
    model, optimizer = stepped(kind, 1, 3)
    before = addresses(model, optimizer)
    graphfsdp.load(path, model, optimizer)
    assert addresses(model, optimizer) == before
    return digests(contents(model, optimizer))


@pytest.mark.parametrize(("kind", "plain"), [("tensor", "feed"), ("expert", "mixture")])
def test_checkpoints_hold_whole_parameters_of_model_parallel_ranks(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool, ranks4: RankPool, kind: str, plain: str
) -> None:
    (expected, *_) = ranks4.run(save_kind, tmp_path / "parallel", kind)
    assert ranks1.run(load_kind, tmp_path / "parallel", plain) == [expected]
    assert ranks2.run(load_kind, tmp_path / "parallel", f"one axis {plain}") == [expected] * 2
    ranks1.run(save_kind, tmp_path / "plain", plain)
    assert ranks4.run(load_kind, tmp_path / "plain", kind) == [expected] * 4
