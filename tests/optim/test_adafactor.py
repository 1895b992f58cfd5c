"""Adafactor: torch's numbers, its replays, its states, and shards."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from adam_helpers import (
    assert_equal,
    copies_of,
    load_in_place,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.optim import Adafactor
from ranks import RankPool

SHAPES: list[tuple[int, ...]] = [(20, 10), (10,), (3, 4, 5), (1, 7)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True, "d": 1.5},
    "eps": {"eps": (1e-4, 1e-2), "beta2_decay": -0.5},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("foreach", [False, True])
def test_steps_are_those_of_torch(name: str, foreach: bool) -> None:
    params, twins = make_twins(SHAPES)
    ours = Adafactor(params, lr=0.1, **SETTINGS[name])
    theirs = torch.optim.Adafactor(twins, lr=0.1, foreach=foreach, **SETTINGS[name])
    for step in range(100):
        set_grads(params, twins)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-5, atol=2e-6)
        for key, value in theirs.state[twin].items():
            torch.testing.assert_close(ours.state[param][key], value, rtol=2e-5, atol=1e-8)


def step_by_hand(sharded: bool) -> list[Tensor]:
    """Return whole weights after steps on the same gradients; the last rank has no row of some."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

    params: list[Any] = [nn.Parameter(place(torch.randn(shape))) for shape in SHAPES]
    optimizer = Adafactor(params, lr=0.1, weight_decay=0.1)
    for _ in range(5):
        for param in params:
            grad = place(torch.randn(param.shape))
            local: Any = grad
            empty = sharded and not local.to_local().numel()
            param.grad = None if empty else grad
        optimizer.step()
    weights = [param.detach() for param in params]
    return [weight.full_tensor() for weight in weights] if sharded else weights


def test_shards_step_as_whole_parameters(ranks2: RankPool) -> None:
    expected = ranks2.run(step_by_hand, False)[0]
    for weights in ranks2.run(step_by_hand, True):
        for left, right in zip(weights, expected, strict=True):
            # Five steps of sums in another order.
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_a_state_of_torch_loads_in_place_and_goes_on() -> None:
    params = make_params(SHAPES)
    source = torch.optim.Adafactor(params, lr=0.1, eps=(None, 1e-2))
    take_steps(1, source)
    twins = copies_of(params)
    target = Adafactor(twins, lr=0.3)
    load_in_place(source, target)
    assert (target.param_groups[0]["lr"], target.param_groups[0]["eps2"]) == (0.1, 1e-2)
    fourth = copy.deepcopy(target)
    others = fourth.param_groups[0]["params"]
    take_steps(3, source, target, fourth)
    assert_equal(twins, others)
    torch.testing.assert_close(params, twins, rtol=2e-5, atol=2e-6)
