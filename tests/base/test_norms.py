"""The global norm of tensors of one rank; what ranks share is asked in optim and in sharding."""

import math

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.base.norms import global_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0.0, 1.0, 6e4], ids=["nothing", "usual", "squares overflow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_whole_tensors_have_torchs_norm(size: float, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(5, 3), (7,), (), (0, 2)] if size else []
    parts = [torch.randn(shape).clamp(-1, 1).mul(size).to(dtype) for shape in shapes]
    got = global_norm(parts, {}, CPU)
    assert got.dtype == torch.float32
    assert got.shape == ()
    expected = math.sqrt(sum(float(part.double().square().sum()) for part in parts))
    assert got.item() == pytest.approx(expected, rel=2e-6)


def test_clipping_refuses_a_limit_that_is_not_positive_and_a_list() -> None:
    with pytest.raises(graphfsdp.ConfigError, match="max_norm must be a positive number, got 0"):
        graphfsdp.clip_grad_norm_(nn.Linear(2, 2), 0.0)
    with pytest.raises(graphfsdp.ConfigError, match=r"got list.*clip_grad_norm_\(model"):
        graphfsdp.clip_grad_norm_([*nn.Linear(2, 2).parameters()], 1.0)  # type: ignore[arg-type]
