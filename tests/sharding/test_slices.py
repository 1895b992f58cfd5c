"""What the rows of all ranks come to together: norms, values that are not finite, bytes."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.base.dtensors import local_part
from ranks import RankPool
from sharding_helpers import (
    adam,
    batches,
    buffers,
    check_slices,
    full_parameters,
    hybrid_net,
    make_net,
    my_part,
)

# One axis; two, cut over the inner ranks; two, cut over all of them.
WORLDS = [("ranks2", None), ("ranks4", "no_shard"), ("ranks4", "optim")]


def make(strategy: str = "optim_grads_params", outer: str | None = None) -> nn.Module:
    return make_net(strategy) if outer is None else hybrid_net(strategy, outer)


def trained(model: nn.Module) -> Tensor:
    """Do one backward pass and one step, with gradients left in place; return their norm."""
    with graphfsdp.capture(model, adam(model), scope="none", max_grad_norm=1.0) as step:
        step(*my_part(batches(1)[0]))
        assert step.grad_norm is not None
        return step.grad_norm


def whole_norm(tensor: Any) -> float:
    norm = tensor.detach().double().norm()
    return float(norm.full_tensor())


def look_at_norms(strategy: str, outer: str | None) -> None:
    model = make(strategy, outer)
    norm = trained(model)
    wholes = full_parameters(model)
    grads = []
    for name, param in model.named_parameters():
        weight = float(wholes[name].double().norm())
        assert math.isclose(whole_norm(param), weight, rel_tol=1e-12, abs_tol=1e-12)
        grad: Any = param.grad
        if grad is not None:
            grads.append(whole_norm(grad))
            expected = float(grad.full_tensor().double().norm())
            assert grads[-1] == pytest.approx(expected, rel=1e-12)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, grads)
    assert all(each == found[0] for each in found)
    assert len(grads) < len(wholes)  # a parameter that nothing uses
    total = math.sqrt(sum(grad**2 for grad in grads))
    assert float(norm) == pytest.approx(total, rel=1e-5)
    for limit, expected in ((total / 2, total), (1e9, total / 2)):
        clipped = graphfsdp.clip_grad_norm_(model, limit)
        assert float(clipped) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "strategy", "outer"),
    [("ranks2", "no_shard", None), *((r, "optim_grads_params", outer) for r, outer in WORLDS)],
)
def test_norms_are_those_of_whole_parameters_and_gradients(
    request: pytest.FixtureRequest, ranks: str, strategy: str, outer: str | None
) -> None:
    request.getfixturevalue(ranks).run(look_at_norms, strategy, outer)


def num_nonfinite(tensor: Any) -> int:
    return int((~tensor.detach().isfinite()).sum().full_tensor())


def look_for_nonfinite(outer: str | None) -> None:
    model = make(outer=outer)
    trained(model)
    assert not any(num_nonfinite(param) for param in model.parameters())
    last = dist.get_world_size() - 1
    planted: list[Any] = [
        name for name, param in model.named_parameters() if local_part(param).numel() > 1
    ][:1]
    dist.broadcast_object_list(planted, src=last)
    param = model.get_parameter(planted[0])
    if dist.get_rank() == last:
        with torch.no_grad():
            local_part(param).view(-1)[:2] = torch.tensor([math.inf, math.nan])
        assert not local_part(param).isfinite().all()
    # Where an outer axis holds copies, the inner axis of this rank counts its own.
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, num_nonfinite(param))
    assert counts[last] == 2
    assert sum(num_nonfinite(each) for each in model.parameters()) == num_nonfinite(param)


@pytest.mark.parametrize(("ranks", "outer"), WORLDS)
def test_values_that_are_not_finite_are_counted_on_all_ranks(
    request: pytest.FixtureRequest, ranks: str, outer: str | None
) -> None:
    request.getfixturevalue(ranks).run(look_for_nonfinite, outer)


def bytes_held(outer: str | None) -> int:
    model: Any = make(outer=outer)
    model.prepare_shards()
    check_slices(model)
    return sum(
        buffer.main.nbytes + (0 if buffer.grad is None else buffer.grad.nbytes)
        for buffer in buffers(model)
    )


def test_two_axes_hold_half_of_what_one_holds(ranks4: RankPool) -> None:
    inside, both = (ranks4.run(bytes_held, outer)[0] for outer in ("no_shard", "optim"))
    # Half, and what the layout may round up: a border of 16 bytes for each buffer and kind.
    assert both <= 0.5 * inside + 16 * 2 * 8
