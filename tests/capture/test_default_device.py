"""torch's default device is the user's: what the product makes for itself lies where it says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.optim import FusedAdam, Muon
from ranks import on_ranks
from sharding_helpers import (
    adam,
    assert_same_training,
    batches,
    hybrid_mesh,
    make_net,
    my_part,
    train,
)
from stand_in_compilers import compiling_by


@contextmanager
def _default(device: torch.device | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)  # a device by name is a mode, and would stay on


def _elsewhere(device: torch.device) -> torch.device:
    """On a GPU the habit; on a CPU what holds no numbers, so that whatever lies there is seen."""
    return device if device.type == "cuda" else torch.device("meta")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda params: FusedAdam(params), {"max_grad_norm": 1.0, "skip_nonfinite": True}),
        (lambda params: FusedAdam(params, adam_w_mode=False), {"microbatches": 2}),
        (lambda params: Muon([{"params": params}], lr=0.1), {"evaluates": True}),
        (lambda params: torch.optim.AdamW(params), {"max_grad_norm": 1.0}),
        (lambda params: torch.optim.AdamW(params), {"compile": True}),
    ],
    ids=["adam", "no correction", "muon", "torch", "compiled"],
)
def test_a_default_device_changes_no_bit(
    device: torch.device,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    options = dict(options)
    evaluates = options.pop("evaluates", False)
    options["compile"] = "compile" in options and device.type == "cpu"

    def trained(default: torch.device | None, folder: Path) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        model, optimizer = model.to(device), make([*model.to(device).parameters()])
        batches = [torch.randn(4, 4).to(device) for _ in range(7)]
        with (
            compiling_by(),
            _default(default),
            graphfsdp.capture(
                model, optimizer, loss_fn=lambda model, x: model(x).square().mean(), **options
            ) as step,
        ):
            seen = [step(batch) for batch in batches]
            if evaluates:
                seen.append(step.evaluate(batches[0]))
            graphfsdp.save(folder, model, optimizer)
            graphfsdp.load(folder, model, optimizer)
            seen.append(step(batches[0]))
            assert step.phase.value == "replay"
            assert not any("else" in line for line in step.report().compiled)
        return [*seen, *(param.detach() for param in model.parameters())]

    expected = trained(None, tmp_path / "expected")
    got = trained(_elsewhere(device), tmp_path / "got")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@on_ranks("ranks2")
@pytest.mark.parametrize("gather_format", [None, "float8"])
def test_a_default_device_changes_no_bit_of_shards(gather_format: str | None) -> None:
    mesh = hybrid_mesh((dist.get_world_size(),), ("all",))
    runs = []
    for default in (None, torch.device("meta")):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, gather_format=gather_format)
        model = make_net("optim_grads_params", mesh=mesh, mp_policy=policy)
        optimizer = adam(model)
        data = [my_part(batch) for batch in batches(7)]
        with _default(default):
            runs.append(train(model, optimizer, data=data))
    assert_same_training(*runs)
