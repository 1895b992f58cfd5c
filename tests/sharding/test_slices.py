"""What the rows of all ranks come to together: norms, values that are not finite, bytes."""

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphfsdp
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


def num_positive(tensor: Any) -> int:
    count = (tensor.detach() > 0).sum()
    return int(count.full_tensor() if isinstance(count, DTensor) else count)


def look_at_norms(strategy: str, outer: str | None) -> None:
    model = make(strategy, outer)
    norm = trained(model)
    wholes = full_parameters(model)
    grads = []
    for name, param in model.named_parameters():
        weight = float(wholes[name].double().norm())
        assert math.isclose(whole_norm(param), weight, rel_tol=1e-12, abs_tol=1e-12)
        assert num_positive(param) == num_positive(wholes[name]), name
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
def test_norms_and_counts_are_those_of_whole_parameters_and_gradients(
    request: pytest.FixtureRequest, ranks: str, strategy: str, outer: str | None
) -> None:
    request.getfixturevalue(ranks).run(look_at_norms, strategy, outer)


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
