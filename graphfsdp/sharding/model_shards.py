"""All units under one root: neighbours in memory, named, and checked against each other."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import unwrapped
from graphfsdp.base.memory_plan import neighbour_starts
from graphfsdp.base.rank_agreement import timeout_of
from graphfsdp.base.torch_internals import (
    all_groups,
    key_of,
    local_tensor_of,
    num_users,
)
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.buffer import Memory, ShardBuffer
from graphfsdp.sharding.schedule import Schedule, Scheduled
from graphfsdp.sharding.unit import Unit

_Kind = tuple[torch.dtype, torch.dtype | None, Memory]  # of main weights, main grads


def set_up(root: nn.Module, units: list[Unit]) -> None:
    """Let all units of a model, in the order of its modules, work together.

    Main weights of all units are neighbours in one storage per dtype, main grads likewise and in
    the same order, so that an optimizer can run over the whole model in a handful of kernels.

    ConfigError: a unit is in the middle of work, or is another one on another rank.
    """
    names = {id(module): name for name, module in root.named_modules()}
    for unit in units:
        # One of a unit's modules may be called on its own, outside of the others' root.
        unit.group.names = [names.get(id(m), type(m).__name__) for m in unit.modules]
        unit.is_root = root in unit.modules
    _refuse_busy_units(units)
    _refuse_other_structure(units)
    pinned = [unit for unit in units if unit.pinned]
    for unit in pinned:
        unit.reshard()
    with torch.inference_mode(False):  # what is made here is trained later
        move_together(units)
        _join_schedules(units)
    for unit in pinned:
        unit.unshard()


def _join_schedules(units: Sequence[Unit]) -> None:
    """Let all units go by one schedule, and give all-gathers communicators of their own."""
    schedule = Schedule()
    for unit in units:
        unit.schedule = schedule
        options = unit.group.options
        for buffer in unit.group.buffers:
            if buffer.packing is not None:
                schedule.packed.add(buffer.packing)
            if not buffer.sharded:
                continue
            if options.overlap:
                buffer.gather_group = _gather_group(buffer.mesh.inner, buffer.mesh.inner.size())
            few, inner = options.num_few, buffer.mesh.inner
            if few and buffer.extension is None and not inner.size() % few:
                buffer.few_ranks = _gather_group(inner, few)
    schedule.units += units


def _refuse_busy_units(units: Sequence[Unit]) -> None:
    for unit in units:
        what = None
        if unit.in_forward:
            what = "is inside its forward pass"
        elif unit.group.has_pending_gradients:
            what = "has gradients that wait for their reduction"
        if what is not None:
            raise ConfigError(
                f"the sharded model cannot be set up while unit {unit.group.name!r} {what}. "
                "Remedy: finish the forward pass, or the accumulation with a synchronised "
                "backward, before a module above it is wrapped or first called"
            )


def _refuse_other_structure(units: Sequence[Unit]) -> None:
    """Compare with the other ranks: a rank that differs would hang or mix up numbers."""
    found = (group for unit in units for group in unit.group.groups)
    groups = dict.fromkeys(group for group in found if group.size() > 1)
    problem: str | None = None
    for group in groups:
        mine = [
            line
            for unit in units
            if group in unit.group.groups
            for line in unit.group.describe(group)
        ]
        # A rank that finds something goes on: those that share another group with it wait.
        everyone: list[tuple[str | None, list[str]]] = [(None, [])] * group.size()
        dist.all_gather_object(everyone, (problem, mine), group)
        ranks = dist.get_process_group_ranks(group)
        for rank, (theirs, lines) in zip(ranks, everyone, strict=True):
            if problem is None and theirs is None and lines != everyone[0][1]:
                theirs = (
                    f"rank {rank} holds another model than rank {ranks[0]}, so their "
                    f"collectives would not fit together: "
                    f"{_difference(everyone[0][1], lines, ranks[0])}. Remedy: build the same "
                    "model with the same dtypes and units on every rank"
                )
            problem = problem or theirs
    if problem is not None:
        raise ConfigError(problem)


def move_together(units: Sequence[Scheduled], in_place_of_meta: torch.device | None = None) -> None:
    """Give memory on that device to the shards that are on the meta device, too.

    Shards that somebody holds, in a state dict that was taken before, stay where they are.
    """
    for unit in units:
        unit.group.take_values()
    held = _held_elsewhere(units)
    kinds: dict[_Kind, list[ShardBuffer]] = {}
    for unit in units:
        unit.group.follow_requires_grad()
        for buffer in unit.group.buffers:
            if in_place_of_meta is not None:
                buffer.leave_meta(in_place_of_meta)
            if not buffer.main.is_meta and key_of(buffer.main.untyped_storage()) in held:
                continue
            grad_dtype = None if buffer.grad is None else buffer.grad.dtype
            kind = (buffer.main.dtype, grad_dtype, buffer.memory)
            kinds.setdefault(kind, []).append(buffer)
    for buffers in kinds.values():
        mains = _neighbours(buffers, [buffer.main for buffer in buffers])
        grads: list[Tensor | None] = [None] * len(buffers)
        found = [buffer.grad for buffer in buffers if buffer.grad is not None]
        if found:
            grads = [*_neighbours(buffers, found)]
        for buffer, main, grad in zip(buffers, mains, grads, strict=True):
            buffer.move(main, grad)
    for unit in units:
        unit.group.bind_views()


def _held_elsewhere(units: Sequence[Scheduled]) -> set[int]:
    """Return keys of the storages of main weights at which others than the units look."""
    ours: dict[int, int] = {}
    for unit in units:
        locals_ = (unwrapped(local_tensor_of(item.param)) for item in unit.group.managed)
        for tensor in (*(buffer.main for buffer in unit.group.buffers), *locals_):
            key = key_of(tensor.untyped_storage())
            ours[key] = ours.get(key, 1) + 1  # one is what asks for the storage
    return {key for key in ours if num_users(key) > ours[key]}


def _difference(first: list[str], other: list[str], rank: int) -> str:
    pairs = zip_longest(first, other, fillvalue="nothing")
    line, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return f"rank {rank} has {line}, the other has {theirs}"


def _neighbours(buffers: list[ShardBuffer], tensors: list[Tensor]) -> list[Tensor]:
    """Return views of one new storage, as long as the given tensors, one after the other."""
    numels = [tensor.numel() for tensor in tensors]
    starts = neighbour_starts(numels, tensors[0].element_size())
    flat = buffers[0].new_zeros(starts[-1], tensors[0].dtype)
    return [flat.narrow(0, *place) for place in zip(starts, numels, strict=False)]


def _gather_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """A communicator for all-gathers of a group, or of so many neighbours in it, made once.

    All ranks must call this together. torch keeps it with all others, so
    ``destroy_process_group()`` closes it. The group itself where one cannot be made: for one rank,
    or where the ranks hold different numbers of groups, from which torch takes the name.
    """
    if group.size() == 1:
        return group
    description = f"graphfsdp all-gather of {group.group_name} by {size}"
    found = next((pg for pg in all_groups() if pg.group_desc == description), None)
    everyone: list[tuple[int, bool]] = [(0, False)] * group.size()
    dist.all_gather_object(everyone, (len(all_groups()), found is not None), group)
    if all(has for _, has in everyone):
        assert found is not None
        return found
    if len(set(everyone)) > 1:
        return group
    first = group.rank() // size * size
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group)[first : first + size],
        timeout=timeout_of(group),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,  # only the ranks of this group are here
        group_desc=description,
    )
    return made
