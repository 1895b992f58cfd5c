"""`copy.deepcopy` of sharded modules: each copy has buffers of its own, over the same ranks."""

import copy
from typing import Any

from torch import nn

from graphfsdp.errors import NotCopyableError
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.module import FSDPModule, forget_shards, unit_of
from graphfsdp.sharding.pipelines import give_state
from graphfsdp.sharding.schedule import Schedule


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
    meshes = [group.options, group.options.mesh, *group.axes.values(), *group.meshes.values()]
    meshes += [buffer.mesh for buffer in group.buffers]
    plans = [part for buffer in group.buffers for part in (buffer.plan, buffer.layout)]
    gathers = [each for buffer in group.buffers for each in (buffer.gather_group, buffer.few_ranks)]
    return [*meshes, *plans, *gathers, *group.groups]
