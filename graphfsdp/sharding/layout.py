"""Where each parameter of a unit lies in its flat buffers, and which rows each rank owns.

Integers only. A unit has one or a few flat buffers; each is cut into ``num_ranks`` shards of
``shard_numel`` elements, and rank k owns the elements [k * shard_numel, (k + 1) * shard_numel).
A border between two ranks never falls inside a row, so what a rank owns of a parameter is a
run of whole rows: a DTensor with uneven ``Shard(0)``. A row is what follows the first dimension;
a 0-D tensor is one row of one element. ``plan_unit`` finds few buffers with little padding.

Example: three float32 parameters on three ranks, one letter for each element, ``|`` where one
rank ends and the next begins, ``.`` where padding lets the next one start on a 16-byte border::

    A (5, 4)  B (5,)  C (4, 4)

    AAAAAAAAAAAAAAAA|AAAABBBBB...CCCC|CCCCCCCCCCCC....

    rank 0: rows 0 to 3 of A
    rank 1: row 4 of A, all of B, row 0 of C
    rank 2: rows 1 to 3 of C

Note [How a buffer is planned]
A shard of ``shard_numel`` elements is tried out by placing every tensor, and the shortest one
found to hold them all is taken. A tensor may lie
- uncut inside one rank's shard, at any aligned element, or
- across rank borders, at a multiple of its row, if ``shard_numel`` is a multiple of that row.
Only tensors longer than a shard have to be cut, so only their rows bind ``shard_numel``. The
*grids* are the least common multiples of the rows of the largest 1, 2, 3, ... tensors; multiples
of each are tried.

Note [How many buffers]
First every row length gets a buffer of its own (1-D tensors are those of row length 1). Such a
buffer holds at most what FSDP2's shards would hold on 16-byte borders; where alignment forbids
that, each of its tensors gets a buffer of its own, with FSDP2's shard. Then buffers are merged
as long as all merges together add at most 1 % to the shards: all into one if that is within it,
else each into the buffer where it adds the least.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphfsdp.base.memory_plan import alignment_numel, round_up
from graphfsdp.eight_bit.formats import BLOCK
from graphfsdp.errors import ConfigError

MERGE_PERCENT = 1
_MAX_TRIES = 8  # shard lengths tried on one grid
_ENDLESS = 1 << 128  # an element that no buffer reaches


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its buffer; ``offset`` is in elements, counted over all ranks."""

    index: int
    offset: int
    shape: tuple[int, ...]

    @cached_property
    def num_rows(self) -> int:
        """Size of the first dimension; a 0-D tensor has one row."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

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

    @property
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

    def ranks_of(self, slot: Slot) -> range:
        if not slot.num_rows:
            return range(0)
        if not slot.numel:  # the rows of a (5, 0) tensor need an owner too
            return range(1)
        return range(slot.offset // self.shard_numel, (slot.end - 1) // self.shard_numel + 1)

    def local_rows(self, slot: Slot, rank: int) -> LocalRows:
        begin = rank * self.shard_numel
        if not slot.numel:
            return LocalRows(slot.num_rows, 0, 0, 0) if rank else LocalRows(0, slot.num_rows, 0, 0)
        first = min(max(slot.offset, begin), begin + self.shard_numel)
        last = max(first, min(slot.end, begin + self.shard_numel))
        rows_before = min(max(begin - slot.offset, 0) // slot.row_numel, slot.num_rows)
        num_rows = (last - first) // slot.row_numel
        return LocalRows(rows_before, num_rows, first - begin, last - first)

    def borders(self, slot: Slot) -> tuple[int, ...]:
        """Return the first row of a slot on each rank, and at the end its number of rows."""
        owners = self.ranks_of(slot)
        inner = [self.local_rows(slot, rank).first_row for rank in owners[1:]]
        before = owners.start + 1 if owners else self.num_ranks
        behind = self.num_ranks - before - len(inner)
        return (*[0] * before, *inner, *[slot.num_rows] * behind, slot.num_rows)


def plan_unit(
    shapes: Sequence[Sequence[int]], *, num_ranks: int, itemsize: int
) -> tuple[BufferLayout, ...]:
    """Lay the parameters of one unit, all of one dtype, out over the ranks.

    The result depends on the arguments alone, so every rank comes to the same one. Over the unit

        shard_numel <= 1.01 * sum of round_up(fsdp2_shard_numel(shape, num_ranks), 16 bytes).

    Any shape is good, also () and ones with a zero. Where kinds of buffers (model weights, main
    weights, main grads) differ in ``itemsize`` (bytes), the smallest: what is aligned for that is
    aligned for all. Buffers are in the order of their first parameter.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    alignment = alignment_numel(itemsize)
    params = [Slot(index, 0, tuple(map(int, shape))) for index, shape in enumerate(shapes)]
    planner = _Planner(num_ranks, alignment)
    buffers = planner.plan([param for param in params if param.numel])
    empty = tuple(param for param in params if not param.numel)
    if empty:
        first = buffers[0] if buffers else BufferLayout(num_ranks, alignment, 0, ())
        slots = (*empty, *first.slots)
        buffers[:1] = [BufferLayout(num_ranks, alignment, first.shard_numel, slots)]
    return tuple(buffers)


def plan_blocks(shapes: Sequence[Sequence[int]], *, num_ranks: int) -> tuple[BufferLayout, ...]:
    """Lay matrices [M, K], K a multiple of 32, out so that no border and no start cuts 32 values.

    As ``plan_unit``, in units of 32 values, of which one is as well aligned as many.
    """
    blocks = [(rows, row_numel // BLOCK) for rows, row_numel in shapes]
    return tuple(
        BufferLayout(
            num_ranks,
            BLOCK,
            BLOCK * layout.shard_numel,
            tuple(
                Slot(slot.index, BLOCK * slot.offset, tuple(map(int, shapes[slot.index])))
                for slot in layout.slots
            ),
        )
        for layout in plan_unit(blocks, num_ranks=num_ranks, itemsize=16)
    )


def fsdp2_shard_numel(shape: Sequence[int], num_ranks: int) -> int:
    """Return the elements that each rank holds of a parameter in PyTorch's FSDP2.

    Every rank's shard is padded to ceil(rows / num_ranks) rows. FSDP2 refuses 0-D parameters
    and asks for shape (1,) instead; () is counted as that.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, padded_sharded_size (torch 2.13).
    """
    num_rows = shape[0] if shape else 1
    return -(-num_rows // num_ranks) * math.prod(shape[1:])


class _Planner:
    def __init__(self, num_ranks: int, alignment: int) -> None:
        self._num_ranks = num_ranks
        self._alignment = alignment

    def plan(self, params: Sequence[Slot]) -> list[BufferLayout]:
        """Return buffers that hold every parameter; see Note [How many buffers]."""
        by_row: dict[int, list[Slot]] = {}
        for param in params:
            by_row.setdefault(param.row_numel, []).append(param)
        separate = [buffer for group in by_row.values() for buffer in self._same_row(group)]
        if len(separate) < 2:
            return separate
        shard_numel = sum(buffer.shard_numel for buffer in separate)
        spare = shard_numel * MERGE_PERCENT // 100
        whole = self._fit(params, shard_numel + spare)
        return [whole] if whole else self._merge(separate, spare)

    def _same_row(self, group: Sequence[Slot]) -> list[BufferLayout]:
        """Return one buffer for tensors of one row length, or one for each of them."""
        limits = [
            round_up(fsdp2_shard_numel(param.shape, self._num_ranks), self._alignment)
            for param in group
        ]
        together = self._fit(group, sum(limits))
        if together:
            return [together]
        alone = [self._fit([param], limit) for param, limit in zip(group, limits, strict=True)]
        return [buffer for buffer in alone if buffer]  # one tensor at offset 0 always fits

    def _merge(self, buffers: Iterable[BufferLayout], spare: int) -> list[BufferLayout]:
        """Merge buffers, largest first, while that adds at most ``spare`` elements to a shard."""
        kept: list[BufferLayout] = []
        for buffer in sorted(buffers, key=lambda buffer: (-buffer.numel, _first_index(buffer))):
            best: tuple[int, int, BufferLayout] | None = None
            for number, host in enumerate(kept):
                separate = host.shard_numel + buffer.shard_numel
                merged = self._fit((*host.slots, *buffer.slots), separate + spare)
                if merged and (best is None or merged.shard_numel - separate < best[0]):
                    best = (merged.shard_numel - separate, number, merged)
            if best is None:
                kept.append(buffer)
            else:
                added, number, kept[number] = best
                spare -= added
        return sorted(kept, key=_first_index)

    def _fit(self, params: Sequence[Slot], limit: int) -> BufferLayout | None:
        """Return the buffer of the shortest shard found, or None if ``limit`` is too short."""
        params = sorted(params, key=lambda param: param.index)
        # Starts are aligned; behind the last tensor nothing starts.
        to_border = [-param.numel % self._alignment for param in params]
        total = sum(param.numel for param in params) + sum(to_border) - max(to_border)
        shortest = max(-(-total // self._num_ranks), *(param.row_numel for param in params))
        grids = _grids(params, limit)
        best: BufferLayout | None = None
        for grid in grids:
            most = limit if best is None else best.shard_numel - 1
            best = self._search(params, grid, shortest, most) or best
        if best is None or best.shard_numel % self._alignment == 0:
            return best
        # A shard of whole 16-byte stretches lets every rank's piece start on one. Long odd
        # rows would make it many times longer; then it stays as it is.
        slack = best.shard_numel * MERGE_PERCENT // 100 + self._alignment - 1
        most = min(limit, best.shard_numel + slack)
        for grid in grids:
            grid = math.lcm(grid, self._alignment)
            aligned = self._search(params, grid, best.shard_numel, most)
            if aligned:
                return aligned
        return best

    def _search(
        self, params: Sequence[Slot], grid: int, shortest: int, longest: int
    ) -> BufferLayout | None:
        """Try multiples of ``grid`` from below; see Note [How a buffer is planned]."""
        orders = _orders(params)
        shard_numel = round_up(shortest, grid)
        longest -= longest % grid
        step = -shard_numel % self._alignment  # first to the next whole 16 bytes
        for _ in range(_MAX_TRIES):
            if shard_numel > longest:
                return None
            ends = []
            for order in orders:
                slots = self._place(order, shard_numel)
                if slots:
                    ends.append(max(slot.end for slot in slots))
                    if ends[-1] <= self._num_ranks * shard_numel:
                        slots.sort(key=lambda slot: slot.offset)
                        return BufferLayout(
                            self._num_ranks, self._alignment, shard_numel, tuple(slots)
                        )
            # What stuck out, spread over the ranks, is enough as a step. It may be far too much,
            # since a tensor that no longer fits into a shard opens a new one.
            spread = -(-min(ends) // self._num_ranks) if ends else longest
            step = max(grid, round_up(min(step, spread - shard_numel), grid))
            # The longest one is tried too, before giving up.
            shard_numel = min(shard_numel + step, max(longest, shard_numel + grid))
            step = 2 * max(step, self._alignment)
        return None

    def _place(self, order: Sequence[Slot], shard_numel: int) -> list[Slot]:
        """Place tensors one after the other, each in the first gap that takes it.

        As if there were as many ranks as it takes; no slots where a tensor can lie nowhere.
        """
        slots: list[Slot] = []
        gaps = [(0, _ENDLESS)]
        for param in order:
            offset = self._take_gap(param, gaps, shard_numel)
            if offset is None:
                return []
            slots.append(Slot(param.index, offset, param.shape))
        return slots

    def _take_gap(self, param: Slot, gaps: list[tuple[int, int]], shard_numel: int) -> int | None:
        """Return where a tensor starts in the first gap that takes it, and cut that gap."""
        for number, (begin, stop) in enumerate(gaps):
            if stop - begin < param.numel:
                continue
            offset = self._first_offset(param, begin, shard_numel)
            if offset is None:
                return None
            end = offset + param.numel
            if end <= stop:
                gaps[number : number + 1] = [
                    gap
                    for gap in ((begin, offset), (end, stop))
                    if round_up(gap[0], self._alignment) < gap[1]
                ]
                return offset
        return None

    def _first_offset(self, param: Slot, begin: int, shard_numel: int) -> int | None:
        """Return the first element from ``begin`` on where no border cuts a row, or None."""
        offset = round_up(begin, self._alignment)
        if offset % shard_numel + param.numel <= shard_numel:
            return offset
        found = []
        if shard_numel % param.row_numel == 0:
            found.append(round_up(begin, math.lcm(param.row_numel, self._alignment)))
        next_shard = round_up(offset + shard_numel - offset % shard_numel, self._alignment)
        if next_shard % shard_numel + param.numel <= shard_numel:
            found.append(next_shard)
        return min(found, default=None)


def _grids(params: Iterable[Slot], limit: int) -> list[int]:
    """Return what the shard may have to be a multiple of, finest first, none above ``limit``."""
    grids: list[int] = []
    grid = 1
    for param in sorted(params, key=lambda param: (-param.numel, param.index)):
        # Tensors above the limit are cut whatever the shard, so no grid can leave them out.
        if param.numel <= limit and grid not in grids:
            grids.append(grid)
        grid = math.lcm(grid, param.row_numel)
        if grid > limit:
            return grids
    return grids if grid in grids else [*grids, grid]


def _orders(params: Sequence[Slot]) -> list[list[Slot]]:
    """Return the orders in which to place tensors, from the most natural to the most compact."""
    return [
        list(params),
        sorted(params, key=lambda param: param.row_numel == 1),
        sorted(params, key=lambda param: -param.numel),
    ]


def _first_index(buffer: BufferLayout) -> int:
    return min(slot.index for slot in buffer.slots)
