"""State dicts and deep copies of sharded modules.

torch puts what ``load_state_dict(assign=True)`` loads in the place of the parameters. A unit's
parameters are views of its flat buffers, so their values are copied there, and what torch assigns
are the parameters themselves. A deep copy has buffers of its own, over the same ranks.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import can_be_copied, local_part
from graphfsdp.base.recut import recut
from graphfsdp.errors import ConfigError, NotCopyableError
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.module import FSDPModule, forget_shards, give_shards_memory, unit_of
from graphfsdp.sharding.pipelines import give_state
from graphfsdp.sharding.schedule import Schedule


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
                f"which is laid out as {item.param.dtype}. Remedy: assign=False, which casts; or "
                f"model.to({value.dtype}) before"
            )
        item.param.copy_(value)
        state[name] = item.param


def _give_memory(group: ShardGroup, values: list[Tensor]) -> None:
    """Give memory to shards on the meta device, where the values are."""
    devices = {local_part(value).device for value in values}
    devices = {device for device in devices if device.type != "meta"}
    if len(devices) > 1:
        raise ConfigError(f"load_state_dict(assign=True) got values on several devices: {devices}")
    for device in devices:
        give_shards_memory(group, device)


def after_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Make what a state dict holds fit for ``copy.deepcopy`` and ``torch.save``."""
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad:
            state_dict[name] = can_be_copied(value)


def deep_copy(module: FSDPModule, memo: dict[int, Any]) -> FSDPModule:
    """Return a copy that has not run yet, with the same values and gradients.

    Hooks of gradients stay with the original, as torch has it for tensors. What ranks share is not
    copied: a target network, or an average of weights, is cut as the model that it follows.

    Raises:
        NotCopyableError: the module is at work, or holds weights that are quantised for a gather.
    """
    group = unit_of(module).group
    _refuse(module)
    for tensor in [item.param for item in group.managed]:
        new = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        vars(new).update(vars(tensor))
        memo.setdefault(id(tensor), new)
    for shared in _shared(group):
        memo[id(shared)] = shared
    memo[id(unit_of(module).schedule)] = Schedule()
    for buffer in group.buffers:
        memo.setdefault(id(buffer.main), buffer.main.clone())
        memo.update((id(gathered), None) for gathered in buffer.gathered)
        if buffer.grad is not None:
            memo.setdefault(id(buffer.grad), buffer.grad.clone())
    memo.update((id(item.main_grad), None) for item in group.managed)
    made: FSDPModule = object.__new__(type(module))
    memo[id(module)] = made
    attributes = {**vars(module)}
    forget_shards(attributes)
    vars(made).update(copy.deepcopy(attributes, memo))
    assert isinstance(made, nn.Module)
    give_state(made)
    copied = unit_of(made).group
    copied.bind_views()
    for old, item in zip(group.managed, copied.managed, strict=True):
        if getattr(old.param, group.grad_attribute, None) is not None:
            setattr(item.param, group.grad_attribute, item.main_grad)
    return made


def _refuse(module: FSDPModule) -> None:
    unit = unit_of(module)
    why = None
    if unit.is_whole or unit.group.has_pending_gradients:
        why = "it is inside of a pass, unsharded, or has gradients that wait for their reduction"
    elif any(buffer.packing or buffer.extension for buffer in unit.group.buffers):
        why = "it has weights that are quantised for their gather"
    if why is not None:
        raise NotCopyableError(
            f"unit {unit.name or '(root)'!r} cannot be copied: {why}. Remedy: copy between two "
            "iterations, and what gathers 8-bit weights by building the model anew, fully_shard, "
            "and load_state_dict(model.state_dict())"
        )


def _shared(group: ShardGroup) -> list[Any]:
    meshes = [group.options, group.options.mesh, *group.axes.values()]
    meshes += [buffer.mesh for buffer in group.buffers]
    plans = [part for buffer in group.buffers for part in (buffer.plan, buffer.layout)]
    gathers = [each for buffer in group.buffers for each in (buffer.gather_group, buffer.few_ranks)]
    return [*meshes, *plans, *gathers, *group.groups]
