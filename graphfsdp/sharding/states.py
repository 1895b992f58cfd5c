"""State dicts of sharded modules.

torch puts what ``load_state_dict(assign=True)`` loads in the place of the parameters. A unit's
parameters are views of its flat buffers, so their values are copied there, and what torch assigns
are the parameters themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import can_be_copied, local_part
from graphfsdp.base.recut import recut
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.module import give_shards_memory, unit_of


@torch.no_grad()
def before_loading(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Bring values into the cut of the parameters; copy here those that are to be assigned."""
    group = unit_of(module).group
    managed = {id(item.param): item for item in group.managed}
    items = {
        f"{prefix}{name}": managed[id(param)]
        for name, param in module.named_parameters(remove_duplicate=False)
        if id(param) in managed and isinstance(state.get(f"{prefix}{name}"), Tensor)
    }
    assigns = metadata.get("assign_to_params_buffers", False)
    if assigns and group.awaits_values:
        _give_memory(group, [state[name] for name in items])
    for name, item in items.items():
        value = state[name] = recut(state[name], item.param)
        if not assigns or value.shape != item.param.shape:
            continue  # torch says what is wrong
        if value.dtype != item.param.dtype:
            raise ConfigError(
                f"load_state_dict(assign=True) got {value.dtype} for {group.full_name(item)!r}, "
                f"which is laid out as {item.param.dtype}. Remedy: assign=False, which casts"
            )
        item.param.copy_(value)
        state[name] = item.param


def _give_memory(group: ShardGroup, values: list[Tensor]) -> None:
    """Give memory to shards on the meta device, where the values are."""
    devices = {local_part(value).device for value in values}
    for device in devices - {torch.device("meta")}:
        give_shards_memory(group, device)


def after_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Make what a state dict holds fit for ``copy.deepcopy`` and ``torch.save``."""
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad:
            state_dict[name] = can_be_copied(value)
