"""Puts the main grads of a unit where the optimizer looks for them."""

from collections.abc import Iterable

from torch import Tensor

from graphfsdp.sharding.group import ManagedParameter, ShardGroup


def main_grads_are_bound(group: ShardGroup) -> bool:
    """Tell whether the main grads hold something to add to; make unbound ones zero then.

    Args:
        group: A unit's parameters.

    Capture: nothing, or one fill for each parameter that has no gradient while others have.
    """
    bound = [item for item in group.trainable if _bound(item, group) is not None]
    if bound and len(bound) < len(group.trainable):
        for item in group.trainable:
            if _bound(item, group) is None and item.buffer.grad is not None:
                item.buffer.local_view(item.buffer.grad, item.slot).zero_()
    return bool(bound)


def bind_main_grads(group: ShardGroup, landed: Iterable[int]) -> None:
    """Bind the main grads of some trainable parameters to them.

    Args:
        group: A unit's parameters.
        landed: Positions of those that have a gradient, among the trainable ones.
    """
    for position in sorted(landed):
        item = group.trainable[position]
        if group.options.policy.use_decoupled_grad:
            item.param.decoupled_grad = item.main_grad  # type: ignore[attr-defined]
        else:
            item.param.grad = item.main_grad


def reduce_pending(group: ShardGroup) -> None:
    """Reduce gradients of earlier microbatches that wait for it, over all ranks.

    Args:
        group: A unit's parameters.

    Capture: see UnreducedGradients.reduce.
    """
    accumulate = main_grads_are_bound(group)
    for buffer in group.buffers:
        if buffer.has_pending_gradients:
            for _ in buffer.reduce(None, accumulate=accumulate, reduction=group.options.reduction):
                pass  # without a lane each collective is waited for


def _bound(item: ManagedParameter, group: ShardGroup) -> Tensor | None:
    if group.options.policy.use_decoupled_grad:
        return getattr(item.param, "decoupled_grad", None)
    return item.param.grad
