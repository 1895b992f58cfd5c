"""Parameters, gradients and an operation counter for the tests of FusedAdam."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = [(20, 10), (10,), (3, 4, 5), (0, 4), ()]
LOW_PRECISION = [torch.bfloat16, torch.float16]


def make_groups(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return list(groups)


def make_params(
    shapes: list[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes or SHAPES]


def copies_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def set_grads(*models: list[nn.Parameter]) -> None:
    for twins in zip(*models, strict=True):
        grad = torch.randn_like(twins[0])
        for param in twins:
            param.grad = grad.clone()


def assert_equal(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    for index, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(ours, theirs), f"parameter {index} differs"


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class SeenOps(TorchDispatchMode):
    """Write down every operation below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append((func, args))
        return func(*args, **(kwargs or {}))

    def of(self, namespace: str) -> list[tuple[Any, tuple[Any, ...]]]:
        return [(func, args) for func, args in self.seen if func.namespace == namespace]
