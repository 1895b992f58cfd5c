"""FusedAdam on two ranks: norm, clipping and skip are those of one."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from graphfsdp.optim import FusedAdam
from ranks import RankPool, rank_device

CLIP = {"skip_nonfinite": True, "max_grad_norm": 0.5}
SETTINGS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "adam": CLIP,
        "amsgrad": {"amsgrad": True, **CLIP},
        "main weights": {"weight_decay": 0.1, "master_weights": True},
    }
)
SHAPES = [(7, 3), (5,), (1, 4)]  # with rows that do not divide: a rank holds less, or nothing
BAD_STEP = 1
FINITE = "main weights"  # no step is bad


def train(
    name: str, sharded: bool
) -> tuple[list[Tensor], dict[str, list[Tensor]], list[float], float]:
    """Return whole weights, whole states, the norm of each step, and how many were skipped."""
    torch.manual_seed(0)
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))

    def place(tensor: Tensor) -> Tensor:
        tensor = tensor.to(rank_device())
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

    def whole(tensor: Any) -> Tensor:
        found: Tensor = tensor.full_tensor() if sharded else tensor
        return found.cpu()

    dtype = torch.bfloat16 if name == "main weights" else torch.float32
    params = [nn.Parameter(place(torch.randn(shape).to(dtype))) for shape in SHAPES]
    optimizer = FusedAdam(params, lr=0.1, **SETTINGS[name])
    norms = []
    for step in range(5):
        for index, param in enumerate(params):
            grad = torch.randn(SHAPES[index]).to(dtype)
            if step == BAD_STEP and index == 0 and name != FINITE:
                grad[6, 2] = math.nan  # on the last rank alone
            param.grad = place(grad)
        optimizer.step()
        norms.append(optimizer.control.grad_norm.item())
    weights = [whole(param.detach()) for param in params]
    keys = [key for key in optimizer.state[params[0]] if key != "step"]
    states = {key: [whole(optimizer.state[param][key]) for param in params] for key in keys}
    return weights, states, norms, optimizer.control.skipped_steps.item()


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_step_as_one(ranks2: RankPool, name: str) -> None:
    weights, states, norms, skipped = ranks2.run(train, name, False)[0]
    finite = name == FINITE
    assert skipped == (0 if finite else 1)
    assert [step for step, norm in enumerate(norms) if not math.isfinite(norm)] == (
        [] if finite else [BAD_STEP]
    )
    for found_weights, found_states, found_norms, found_skipped in ranks2.run(train, name, True):
        assert found_skipped == skipped
        for norm, other in zip(found_norms, norms, strict=True):
            assert norm == pytest.approx(other, rel=1e-6) or not math.isfinite(norm + other)
        assert found_states.keys() == states.keys()
        pairs = [*zip(found_weights, weights, strict=True)]
        for key, tensors in states.items():
            pairs += zip(found_states[key], tensors, strict=True)
        for left, right in pairs:
            rtol = 2.0**-7 if left.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(left, right, rtol=rtol, atol=1e-6)
