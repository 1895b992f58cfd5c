"""Tensor subclasses that handle operators themselves are recorded as what they wrap."""

from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from zoo_models import WIDTH


class Wrapped(torch.Tensor):
    """A tensor subclass that handles operators itself, as DTensor does."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        result = func(*(unwrap(arg) for arg in args), **(kwargs or {}))
        return Wrapped(result) if isinstance(result, Tensor) else result


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert isinstance(x, Wrapped)
        inner: Tensor = x.inner
        return inner

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Wrapped(grads[0])


class WithWrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = Wrapped(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).detach() * self.scale
        assert isinstance(hidden, Wrapped)
        loss: Tensor = (self.layer(x) * hidden.inner).square().mean()
        self.scale.inner.mul_(1.01)
        return loss


def test_wrapper_subclasses_are_recorded_as_what_they_wrap() -> None:
    losses = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = WithWrapper()
        step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.01), scope=scope)
        generator = torch.Generator().manual_seed(0)
        losses.append([step(torch.randn(4, WIDTH, generator=generator)) for _ in range(14)])
        losses[-1].append(model.scale.inner)
        if scope != "none":
            assert not [name for name in step.report().op_counts if "Wrapped" in name]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
