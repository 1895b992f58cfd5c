"""The global norm of tensors of one rank; what ranks share is asked in optim and in sharding."""

import math

import pytest
import torch
from torch import nn

import graphfsdp


@pytest.mark.parametrize("size", [0.0, 1.0, 6e4], ids=["nothing", "usual", "squares overflow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_whole_gradients_have_torchs_norm(size: float, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(5, 3), (7,), (), (0, 2)]
    model = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).clamp(-1, 1).mul(size).to(dtype) if size else None
    squares = [param.grad.double().square().sum() for param in model if param.grad is not None]
    got = graphfsdp.clip_grad_norm_(model, 1e9)
    assert got.dtype == torch.float32
    assert got.shape == ()
    assert got.item() == pytest.approx(math.sqrt(sum(map(float, squares))), rel=2e-6)


def test_clipping_refuses_a_limit_that_is_not_positive_and_a_list() -> None:
    with pytest.raises(graphfsdp.ConfigError, match="max_norm must be a positive number, got 0"):
        graphfsdp.clip_grad_norm_(nn.Linear(2, 2), 0.0)
    with pytest.raises(graphfsdp.ConfigError, match=r"got list.*clip_grad_norm_\(model"):
        graphfsdp.clip_grad_norm_([*nn.Linear(2, 2).parameters()], 1.0)  # type: ignore[arg-type]
