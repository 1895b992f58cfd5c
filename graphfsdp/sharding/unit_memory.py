"""What `to_empty` and its like do to a unit on the meta device: memory, but no values yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from graphfsdp.errors import ConfigError
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.materialize.meta_tensors import mark_unset_


@contextmanager
def set_aside(
    group: ShardGroup, function: Callable[[Tensor], Tensor]
) -> Iterator[torch.device | None]:
    """Keep a unit's parameters out of ``nn.Module._apply``, and say where they are to be.

    Args:
        group: The unit's.
        function: What ``_apply`` would replace each tensor with.

    Yields:
        The device that it moves tensors to; None if it leaves them on the meta device.

    Raises:
        ConfigError: it casts them.
    """
    device = None
    for buffer in group.buffers:
        probe = torch.empty(0, dtype=buffer.main.dtype, device="meta")
        moved = function(probe)  # torch says what to do instead, if it needs values
        if moved.dtype != probe.dtype:
            raise ConfigError(
                f"parameter {group.full_name(group.managed[0])!r} cannot be cast to "
                f"{moved.dtype}: its unit is laid out already. Remedy: cast the model before "
                "fully_shard, or give fully_shard an mp_policy"
            )
        device = None if moved.is_meta else moved.device
    places = [(owner, name, item.param) for item in group.managed for owner, name in item.owners]
    for owner, name, _ in places:
        owner._parameters[name] = None
    try:
        yield device
    finally:
        for owner, name, param in places:
            owner._parameters[name] = param


def give_shards_memory(group: ShardGroup, device: torch.device) -> None:
    """Give a unit's shards memory where they have none; values are the user's from now on."""
    for buffer in group.buffers:
        if buffer.main.is_meta:
            main, grad = torch.zeros_like(buffer.main, device=device), buffer.grad
            buffer.move(main, None if grad is None else torch.zeros_like(grad, device=device))
    group.bind_views()
    for item in group.managed:
        if item.awaited is not None:
            mark_unset_(item.buffer.local_view(item.buffer.main, item.slot))
            item.awaited = None
