"""Where each parameter of a unit lies in its flat buffers, and which rows each rank owns.

From shapes and dtypes alone. A unit has one or a few flat buffers; each is cut into ``num_ranks``
shards of ``shard_numel`` elements; rank k owns [k * shard_numel, (k + 1) * shard_numel).
A border between two ranks never falls inside a row, so what a rank owns of a parameter is a
run of whole rows: a DTensor with uneven ``Shard(0)``. A row is what follows the first dimension;
a 0-D tensor is one row of one element.

Example: three float32 parameters on three ranks, one letter for each element, ``|`` where one
rank ends and the next begins, ``.`` for padding::

    A (5, 4)  B (5,)  C (4, 4)

    AAAAAAAAAAAAAAAA|AAAACCCCCCCCCCCC|CCCCBBBBB.......

    rank 0: rows 0 to 3 of A
    rank 1: row 4 of A, rows 0 to 2 of C
    rank 2: row 3 of C, all of B

Note [How a buffer is planned]: ``shard_numel`` is a multiple of each row in the buffer, and each
tensor starts at a multiple of its row and on a 16-byte border: so no border can cut a row. Tensors
of long rows lie first, 1-D ones (rows of one element), which may start anywhere, last.

Note [How many buffers]: from the row length with most elements downwards, a row length joins the
first buffer whose shards are then at most 1 % longer than those of its row lengths, each in a
buffer of its own; else it opens one. By itself it is held to what FSDP2's shards would hold on
16-byte borders; where alignment forbids that, each of its tensors has a buffer.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from graphfsdp.base.dtensors import EXTENSION, local_part
from graphfsdp.base.memory import alignment_numel, round_up
from graphfsdp.base.torch_internals import parameters_of
from graphfsdp.config import GatherFormat, MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.eight_bit.cast import BLOCK
from graphfsdp.errors import ConfigError

MERGE_PERCENT = 1


class UnevenError(ConfigError, NotImplementedError):
    """A dimension does not divide into as many parts as there are ranks, as torch's says it."""


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its buffer; ``offset`` is in elements, counted over all ranks.

    Rows are those of ``dim``; where that is not the first one, it lies in memory as if it were.
    """

    index: int
    offset: int
    shape: tuple[int, ...]
    dim: int = 0

    @cached_property
    def num_rows(self) -> int:
        """Size of the dimension that is cut; a 0-D tensor has one row."""
        return self.shape[self.dim] if self.shape else 1

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def row_numel(self) -> int:
        return math.prod(self.row_shape)

    @cached_property
    def numel(self) -> int:
        return self.num_rows * self.row_numel

    @cached_property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class LocalRows:
    """What one rank owns of one parameter; ``shard_offset`` is in elements from its shard's start.

    Where it owns no row, ``first_row`` is the number of rows that lower ranks own.
    """

    first_row: int
    num_rows: int
    shard_offset: int
    numel: int


@dataclass(frozen=True)
class BufferLayout:
    """One flat buffer: equal shards, and slots that no rank border cuts inside a row.

    Slots start at multiples of ``alignment`` elements (16 bytes), in order of offset; parameters
    without elements come first, at offset 0. ``shard_numel`` includes padding.
    """

    num_ranks: int
    alignment: int
    shard_numel: int
    slots: tuple[Slot, ...]

    @cached_property
    def total_numel(self) -> int:
        """Number of elements of all shards together, padding included."""
        return self.num_ranks * self.shard_numel

    @cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def num_padding(self) -> int:
        """Number of elements that belong to no parameter, over all ranks."""
        return self.total_numel - self.numel

    def local_rows(self, slot: Slot, rank: int) -> LocalRows:
        begin = rank * self.shard_numel
        if not slot.numel:  # the rows of a (5, 0) tensor need an owner too
            return LocalRows(slot.num_rows, 0, 0, 0) if rank else LocalRows(0, slot.num_rows, 0, 0)
        first = min(max(slot.offset, begin), begin + self.shard_numel)
        last = max(first, min(slot.end, begin + self.shard_numel))
        rows_before = min(max(begin - slot.offset, 0) // slot.row_numel, slot.num_rows)
        num_rows = (last - first) // slot.row_numel
        return LocalRows(rows_before, num_rows, first - begin, last - first)

    def borders(self, slot: Slot) -> tuple[int, ...]:
        """Return the first row of a slot on each rank, and at the end its number of rows."""
        first_rows = (self.local_rows(slot, rank).first_row for rank in range(self.num_ranks))
        return (*first_rows, slot.num_rows)


@dataclass(frozen=True)
class BufferDtypes:
    """Of gathered weights, main weights, main grads, and what gradients are reduced in."""

    compute: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    comm: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> "BufferDtypes":
        if not dtype.is_floating_point:
            return cls(dtype, dtype, dtype, dtype)
        main = policy.main_params_dtype or dtype
        grad = policy.main_grads_dtype or main
        compute = policy.param_dtype or dtype
        return cls(compute, main, grad, policy.comm_dtype or grad)


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer of a unit before it has memory; ``names`` are in the order of the slots.

    ``strategy`` is NO_SHARD for scalars, which have no rows to share out.
    """

    layout: BufferLayout
    names: tuple[str, ...]
    dtypes: BufferDtypes
    strategy: ShardingStrategy
    trainable: bool
    gather_format: GatherFormat | None = None

    @property
    def sharded(self) -> bool:
        return self.strategy is not ShardingStrategy.NO_SHARD

    @property
    def main_numel(self) -> int:
        return self.layout.shard_numel if self.sharded else self.layout.total_numel

    def num_scales_of(self, slot: Slot) -> int:
        if self.gather_format is GatherFormat.FLOAT8:
            return 1
        return slot.num_rows if self.gather_format is GatherFormat.FLOAT8_ROWWISE else 0


def linear_weights(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of weights that ``nn.Linear`` alone holds, in the modules given."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for module in modules:
        for name, param in parameters_of(module).items():
            found[isinstance(module, nn.Linear) and name == "weight"].add(id(param))
    return found[True] - found[False]


def plan_buffers(
    params: Mapping[str, nn.Parameter],  # by full name within the unit, each once
    *,
    policy: MixedPrecisionPolicy,
    strategy: ShardingStrategy,
    num_ranks: int,
    linear: Container[int] = (),  # what linear_weights has found
    dims: Mapping[str, int] = MappingProxyType({}),  # that are cut, evenly if not the first ones
) -> list[BufferPlan]:
    shapes = {name: tuple(local_part(param).shape) for name, param in params.items()}
    kinds: dict[tuple[Any, ...], list[str]] = {}
    plans = []
    for name, param in params.items():
        dim, extended = dims.get(name, 0), hasattr(param, EXTENSION)
        if extended or (dim and strategy is not ShardingStrategy.NO_SHARD):
            parts = 1 if strategy is ShardingStrategy.NO_SHARD else num_ranks
            why = "fsdp_pre_all_gather" if extended else f"shard_placement_fn=Shard({dim})"
            layout = _equal_rows(name, Slot(0, 0, shapes[name], dim), parts, why)
            dtypes = BufferDtypes.of(param.dtype, policy)
            plans.append(BufferPlan(layout, (name,), dtypes, strategy, param.requires_grad))
            continue
        packs = None
        if policy.gather_format is not None and id(param) in linear and param.is_floating_point():
            packs = _gather_format(name, shapes[name], policy)
        has_rows = len(shapes[name]) > 0
        kind = (param.dtype, param.device, param.requires_grad, has_rows, packs)
        kinds.setdefault(kind, []).append(name)
    for (dtype, _, trainable, has_rows, packs), names in kinds.items():
        dtypes = BufferDtypes.of(dtype, policy)
        # A scalar has no rows to share out: every rank holds it.
        used = strategy if has_rows else ShardingStrategy.NO_SHARD
        itemsizes = [dtypes.main.itemsize, dtypes.compute.itemsize, dtypes.grad.itemsize]
        itemsizes += [] if packs is None else [1]
        for layout in plan_unit(
            [shapes[name] for name in names],
            num_ranks=1 if used is ShardingStrategy.NO_SHARD else num_ranks,
            itemsize=min(itemsizes),
        ):
            members = tuple(names[slot.index] for slot in layout.slots)
            plans.append(BufferPlan(layout, members, dtypes, used, trainable, packs))
    return plans


def _equal_rows(name: str, slot: Slot, num_ranks: int, why: str) -> BufferLayout:
    if not slot.shape or slot.num_rows % num_ranks:
        raise UnevenError(
            f"{name!r} of shape {slot.shape} has {why}, for which each of the {num_ranks} ranks "
            "must have as much. Remedy: a size that the ranks divide, or a plain parameter that is "
            "cut by its first dimension"
        )
    return BufferLayout(num_ranks, 1, slot.numel // num_ranks, (slot,))


def _gather_format(
    name: str, shape: tuple[int, ...], policy: MixedPrecisionPolicy
) -> GatherFormat | None:
    if not math.prod(shape):
        return None
    chosen = GatherFormat.parse(policy.gather_format)
    if chosen is GatherFormat.MXFP8 and shape[-1] % BLOCK:
        raise ConfigError(
            f"gather_format='mxfp8' has a scale for each {BLOCK} values of a row, and {name!r} of "
            f"shape {shape} has rows of {shape[-1]}. Remedy: in_features that "
            f"{BLOCK} divides, gather_format='float8', or a unit of its own for that layer"
        )
    return chosen


def plan_unit(
    shapes: Sequence[Sequence[int]], *, num_ranks: int, itemsize: int
) -> tuple[BufferLayout, ...]:
    """Lay the parameters of one unit, all of one dtype, out over the ranks.

    The result depends on the arguments alone, so every rank comes to the same one. Over the unit

        shard_numel <= 1.01 * sum of round_up(fsdp2_shard_numel(shape, num_ranks), 16 bytes).

    Any shape is good, also () and ones with a zero. Where kinds of buffers (model weights, main
    weights, main grads) differ in ``itemsize`` (bytes), the smallest: what is aligned for that is
    aligned for all. Buffers are in the order of their first parameter. Where all rows are multiples
    of a block of values that share a scale, no border and no start cuts one, since starts and
    shards are multiples of rows.
    """
    alignment = alignment_numel(itemsize)
    params = [Slot(index, 0, tuple(map(int, shape))) for index, shape in enumerate(shapes)]
    by_row: dict[int, list[Slot]] = {}
    for param in params:
        if param.numel:
            by_row.setdefault(param.row_numel, []).append(param)
    separate = [
        buffer for group in by_row.values() for buffer in _of_one_row(group, num_ranks, alignment)
    ]
    buffers = _joined(separate)
    empty = tuple(param for param in params if not param.numel)
    if empty:
        first = buffers[0] if buffers else BufferLayout(num_ranks, alignment, 0, ())
        buffers[:1] = [replace(first, slots=(*empty, *first.slots))]
    return tuple(buffers)


def fsdp2_shard_numel(shape: Sequence[int], num_ranks: int) -> int:
    """Return the elements that each rank holds of a parameter in PyTorch's FSDP2.

    Every rank's shard is padded to ceil(rows / num_ranks) rows. FSDP2 refuses 0-D parameters
    and asks for shape (1,) instead; () is counted as that.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, padded_sharded_size (torch 2.13).
    """
    num_rows = shape[0] if shape else 1
    return -(-num_rows // num_ranks) * math.prod(shape[1:])


def _of_one_row(group: Sequence[Slot], num_ranks: int, alignment: int) -> list[BufferLayout]:
    """Return one buffer for tensors of one row length, or one for each of them."""
    limits = [round_up(fsdp2_shard_numel(param.shape, num_ranks), alignment) for param in group]
    together = _place(group, num_ranks, alignment, sum(limits))
    if together:
        return [together]
    alone = [
        _place([param], num_ranks, alignment, limit)
        for param, limit in zip(group, limits, strict=True)
    ]
    return [buffer for buffer in alone if buffer]  # one tensor at offset 0 always fits


def _joined(separate: Sequence[BufferLayout]) -> list[BufferLayout]:
    """Return fewer buffers; see Note [How many buffers]."""
    kept: list[tuple[BufferLayout, int]] = []  # with the sum of its members' own shards
    for buffer in sorted(separate, key=lambda buffer: (-buffer.numel, _first_index(buffer))):
        for number, (host, own) in enumerate(kept):
            own += buffer.shard_numel
            limit = own + own * MERGE_PERCENT // 100
            slots = (*host.slots, *buffer.slots)
            merged = _place(slots, buffer.num_ranks, buffer.alignment, limit)
            if merged:
                kept[number] = merged, own
                break
        else:
            kept.append((buffer, buffer.shard_numel))
    return sorted((buffer for buffer, _ in kept), key=_first_index)


def _place(
    params: Sequence[Slot], num_ranks: int, alignment: int, limit: int
) -> BufferLayout | None:
    """Return a buffer as in Note [How a buffer is planned]; None if its shards pass ``limit``."""
    slots: list[Slot] = []
    grid, end = 1, 0
    for param in sorted(params, key=lambda param: (-param.row_numel, param.index)):
        row = param.row_numel if num_ranks > 1 else 1  # one rank has no borders
        grid = math.lcm(grid, row)
        slots.append(replace(param, offset=round_up(end, math.lcm(row, alignment))))
        end = slots[-1].end
    shard_numel = round_up(-(-end // num_ranks), grid)
    # A shard of whole 16-byte stretches lets every rank's piece start on one. Long odd rows would
    # make it many times longer; then it stays as it is.
    slack = shard_numel * MERGE_PERCENT // 100 + alignment - 1
    aligned = round_up(shard_numel, math.lcm(grid, alignment))
    if aligned <= min(limit, shard_numel + slack):
        shard_numel = aligned
    if shard_numel > limit:
        return None
    return BufferLayout(num_ranks, alignment, shard_numel, tuple(slots))


def _first_index(buffer: BufferLayout) -> int:
    return min(slot.index for slot in buffer.slots)
