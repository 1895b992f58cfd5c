"""FusedAdam's own norm, clipping and skip where every rank holds a part of each gradient."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.storage import MOMENTS
from ranks import RankPool

SHAPES = [(7, 3), (5,), (1, 4)]  # with rows that do not divide: a rank holds less, or nothing
BAD_STEP = 1


def _train(norm_type: float, sharded: bool) -> tuple[list[torch.Tensor], list[float], float]:
    """Return whole weights, the norm of each step, and the number of skipped steps."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

    params = [nn.Parameter(place(torch.randn(shape))) for shape in SHAPES]
    settings: dict[str, Any] = {"max_grad_norm": 0.5, "norm_type": norm_type}
    optimizer = FusedAdam(params, lr=0.1, skip_nonfinite=True, **settings)
    norms = []
    for step in range(4):
        for index, param in enumerate(params):
            grad = torch.randn(SHAPES[index])
            if step == BAD_STEP and index == 0:
                grad[6, 2] = math.nan  # on the last rank alone
            param.grad = place(grad)
        optimizer.step()
        norms.append(optimizer.control.grad_norm.item())
    whole = [
        param.detach().full_tensor() if sharded else param.detach()  # type: ignore[attr-defined]
        for param in params
    ]
    return whole, norms, optimizer.control.skipped_steps.item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ranks_clip_and_skip_as_one(ranks2: RankPool, norm_type: float) -> None:
    expected = ranks2.run(_train, norm_type, False)[0]
    for weights, norms, skipped in ranks2.run(_train, norm_type, True):
        assert skipped == expected[2] == 1
        for step, (one, other) in enumerate(zip(norms, expected[1], strict=True)):
            if step == BAD_STEP:
                assert not math.isfinite(one)
            else:
                assert one == pytest.approx(other, rel=1e-6)
        for left, right in zip(weights, expected[0], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def _train_scaled(sharded: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return whole weights and whole scales; parameters have float8 and float16 moments."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

    shapes = [(7, 300), (1, 40), (4, 2, 20)]
    params = [nn.Parameter(place(torch.randn(shape))) for shape in shapes]
    optimizer = FusedAdam(
        params, lr=0.1, exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16
    )
    for _ in range(3):
        for param, shape in zip(params, shapes, strict=True):
            param.grad = place(torch.randn(shape))
        optimizer.step()
    scales = [optimizer.state[param][f"{key}_scale"] for param in params for key in MOMENTS[:2]]
    found = [[*map(torch.Tensor.detach, params)], scales]
    if sharded:
        found = [[tensor.full_tensor() for tensor in tensors] for tensors in found]
    return found[0], found[1]


def test_scaled_moments_do_not_depend_on_the_number_of_ranks(ranks2: RankPool) -> None:
    weights, scales = ranks2.run(_train_scaled, False)[0]
    assert [tuple(scale.shape) for scale in scales[::2]] == [(7, 2), (1, 1), (4, 1)]
    for found_weights, found_scales in ranks2.run(_train_scaled, True):
        for left, right in zip([*found_weights, *found_scales], [*weights, *scales], strict=True):
            assert torch.equal(left, right)
