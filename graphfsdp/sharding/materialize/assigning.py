"""``load_state_dict(assign=True)`` on sharded modules: values go to where the shards lie.

torch puts what it loads in the place of the parameters. A unit's parameters are views of its flat
buffers, so their values are copied there, and what torch assigns are the parameters themselves.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part
from graphfsdp.base.recut import recut_hook
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.group import ManagedParameter
from graphfsdp.sharding.module import give_shards_memory, unit_of


def receive_values(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Give memory to shards on the meta device, where the values are that are to be assigned."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    group = unit_of(module).group
    devices = {
        local_part(value).device
        for _, value in _assigned(module, state, prefix)
        if group.awaits_values
    }
    devices = {device for device in devices if device.type != "meta"}
    if len(devices) > 1:
        raise ConfigError(f"load_state_dict(assign=True) got values on several devices: {devices}")
    for device in devices:
        give_shards_memory(group, device)


def recut_values(module: nn.Module, *args: Any) -> None:
    """Bring what is about to be loaded into the cut of the parameters."""
    recut_hook(lambda: [item.param for item in unit_of(module).group.managed])(module, *args)


@torch.no_grad()
def assign_in_place(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Copy what is to be assigned, which has the rows of the parameters by now."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    group = unit_of(module).group
    for item, value in list(_assigned(module, state, prefix)):
        name = group.full_name(item)
        if value.shape != item.param.shape or value is item.param:
            continue  # torch says what is wrong
        if value.dtype != item.param.dtype:
            raise ConfigError(
                f"load_state_dict(assign=True) got {value.dtype} for {name!r}, which is laid out "
                f"as {item.param.dtype}. Remedy: assign=False, which casts; or model.to("
                f"{value.dtype}) before"
            )
        item.param.copy_(value)
    for key, item in _keys(module, prefix):
        if key in state and state[key].shape == item.param.shape:
            state[key] = item.param


def _assigned(
    module: nn.Module, state: dict[str, Any], prefix: str
) -> Iterator[tuple[ManagedParameter, Tensor]]:
    for key, item in _keys(module, prefix):
        if isinstance(state.get(key), Tensor):
            yield item, state[key]


def _keys(module: nn.Module, prefix: str) -> Iterator[tuple[str, ManagedParameter]]:
    managed = {id(item.param): item for item in unit_of(module).group.managed}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in managed:
            yield f"{prefix}{name}", managed[id(param)]
