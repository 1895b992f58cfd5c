"""Unsharding as a function of autograd.

Note [Unshard as an operator of autograd]: the whole weights of a unit are outputs of one
autograd function, whose backward gets all their gradients at once and reduces them. Operators
inside the unit save weights for backward not as tensors but as places in the gathered buffer
(saved-tensor hooks), so after forward nothing holds the buffer and it is freed by itself; the
first operator of the backward pass that asks for a place gathers it again. No storage is ever
resized, no hook waits on a parameter, and a recording sees ordinary operators only.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from graphfsdp.sharding.group import ShardGroup


class TakesGradients(Protocol):
    """What the function asks of a unit."""

    @property
    def group(self) -> ShardGroup:
        """Its parameters and buffers."""
        ...

    def unreduced_gradient(self, position: int) -> Tensor:
        """Return the whole gradient of one weight."""
        ...

    def take_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Take the whole gradients of the trainable parameters."""
        ...


class Unshard(Function):
    """Whole weights forward, reduced gradients backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, unit: TakesGradients) -> tuple[Tensor, ...]:
        """Return the whole trainable weights; the token makes autograd keep the function."""
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # a weight that was not used has no gradient
        return tuple(view for item, view in unit.group.full_views() if item.buffer.trainable)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        """Hand the unit all their gradients at once."""
        ctx.unit.take_gradients(grads)
        return None, None


def differentiable_views(unit: TakesGradients, token: Tensor) -> list[Tensor]:
    """Return the whole weights of a unit as its modules compute with them.

    Args:
        unit: The unit.
        token: Makes autograd keep the function.
    """
    group = unit.group
    if not (torch.is_grad_enabled() and group.trainable):
        return [view for _, view in group.full_views()]
    whole = Unshard.apply(token, unit)  # type: ignore[no-untyped-call]
    for position, tensor in enumerate(whole):
        # Names that Megatron's and Transformer Engine's layers look for.
        tensor.get_main_grad = functools.partial(unit.unreduced_gradient, position)
        tensor.grad_added_to_main_grad = False
    trainable = iter(whole)
    return [
        next(trainable) if item.buffer.trainable else view.detach()
        for item, view in group.full_views()
    ]
