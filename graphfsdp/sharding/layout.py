"""Where each parameter of a unit lies in its flat buffers, and which rows each rank owns.

Integers only. A unit has one or a few flat buffers; each is cut into ``num_ranks`` shards of
``shard_numel`` elements, and rank k owns the elements [k * shard_numel, (k + 1) * shard_numel).
A border between two ranks never falls inside a row, so what a rank owns of a parameter is a
run of whole rows: a DTensor with uneven ``Shard(0)``. A row is what follows the first dimension;
a 0-D tensor is one row of one element.

Example: three float32 parameters on three ranks, one letter for each element, ``|`` where one
rank ends and the next begins, ``.`` where padding lets the next one start on a 16-byte border::

    A (5, 4)  B (5,)  C (4, 4)

    AAAAAAAAAAAAAAAA|AAAABBBBB...CCCC|CCCCCCCCCCCC....

    rank 0: rows 0 to 3 of A
    rank 1: row 4 of A, all of B, row 0 of C
    rank 2: rows 1 to 3 of C
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from graphfsdp.errors import ConfigError

ALIGNMENT_BYTES = 16  # widest vector load of a GPU thread
ITEMSIZES = (1, 2, 4, 8, 16)


def alignment_numel(itemsize: int) -> int:
    """Return how many elements of ``itemsize`` bytes lie between two 16-byte borders."""
    if itemsize not in ITEMSIZES:
        raise ConfigError(f"itemsize must be one of {ITEMSIZES} bytes, got {itemsize}")
    return ALIGNMENT_BYTES // itemsize


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its buffer.

    Attributes:
        index: Number of the parameter in the unit.
        offset: First element in the buffer, counted over all ranks.
        shape: Full shape of the parameter.
    """

    index: int
    offset: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.index < 0 or self.offset < 0 or any(size < 0 for size in self.shape):
            raise ConfigError(f"a slot holds no negative number, got {self}")

    @cached_property
    def num_rows(self) -> int:
        """Size of the first dimension; a 0-D tensor has one row."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def row_numel(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return self.num_rows * self.row_numel

    @cached_property
    def end(self) -> int:
        """First element of the buffer behind the slot."""
        return self.offset + self.numel


@dataclass(frozen=True)
class LocalRows:
    """What one rank owns of one parameter.

    Attributes:
        first_row: First row of the parameter that this rank owns; where it owns none, the
            number of rows that lower ranks own.
        num_rows: How many rows it owns, maybe none.
        shard_offset: Where they begin, in elements from the start of the rank's shard.
        numel: How many elements they are.
    """

    first_row: int
    num_rows: int
    shard_offset: int
    numel: int


@dataclass(frozen=True)
class BufferLayout:
    """One flat buffer: equal shards, and slots that no rank border cuts inside a row.

    Attributes:
        num_ranks: Number of ranks that share the buffer.
        alignment: Every slot starts at a multiple of this many elements (16 bytes).
        shard_numel: Number of elements of each rank's shard, padding included.
        slots: In order of offset. Parameters without elements come first, at offset 0.
    """

    num_ranks: int
    alignment: int
    shard_numel: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.alignment < 1 or self.shard_numel < 0:
            raise ConfigError(
                "a buffer needs num_ranks >= 1, alignment >= 1 and shard_numel >= 0, got "
                f"{self.num_ranks}, {self.alignment} and {self.shard_numel}"
            )
        for before, after in pairwise(self.slots):
            if before.end > after.offset:
                raise ConfigError(
                    f"slots overlap or are out of order: parameter {before.index} holds the "
                    f"elements [{before.offset}, {before.end}), the next slot, parameter "
                    f"{after.index}, starts at {after.offset}"
                )
        for slot in self.slots:
            self._check(slot)

    def _check(self, slot: Slot) -> None:
        if slot.end > self.total_numel:
            raise ConfigError(
                f"parameter {slot.index} ends at element {slot.end} of a buffer of "
                f"{self.total_numel} ({self.num_ranks} ranks x {self.shard_numel})"
            )
        if slot.offset and not slot.numel:
            raise ConfigError(
                f"parameter {slot.index} has no element and must lie at offset 0, got {slot.offset}"
            )
        if slot.offset % self.alignment:
            raise ConfigError(
                f"parameter {slot.index} starts at element {slot.offset}, "
                f"not at a multiple of {self.alignment}"
            )
        # The first border inside the slot, then the distance to the others, must be whole rows.
        ranks = self.ranks_of(slot)
        if slot.numel and len(ranks) > 1:
            border = (ranks.start + 1) * self.shard_numel
            if (border - slot.offset) % slot.row_numel:
                self._refuse_cut(slot, border)
            if len(ranks) > 2 and self.shard_numel % slot.row_numel:
                self._refuse_cut(slot, border + self.shard_numel)

    def _refuse_cut(self, slot: Slot, border: int) -> None:
        raise ConfigError(
            f"the rank border at element {border} cuts parameter {slot.index} of shape "
            f"{slot.shape} inside a row: it starts at element {slot.offset}, "
            f"and a row is {slot.row_numel} elements"
        )

    @property
    def total_numel(self) -> int:
        """Number of elements of all shards together, padding included."""
        return self.num_ranks * self.shard_numel

    @cached_property
    def numel(self) -> int:
        """Number of elements of the parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def num_padding(self) -> int:
        """Number of elements that belong to no parameter, over all ranks."""
        return self.total_numel - self.numel

    @cached_property
    def grid(self) -> int:
        """Least common multiple of the row lengths of the slots that a rank border cuts."""
        cut = (slot.row_numel for slot in self.slots if slot.numel and len(self.ranks_of(slot)) > 1)
        return math.lcm(*cut)

    def ranks_of(self, slot: Slot) -> range:
        """Return the ranks that own rows of a slot of this buffer, in O(1)."""
        if not slot.num_rows:
            return range(0)
        if not slot.numel:  # the rows of a (5, 0) tensor need an owner too
            return range(1)
        return range(slot.offset // self.shard_numel, (slot.end - 1) // self.shard_numel + 1)

    def slots_of(self, rank: int) -> tuple[Slot, ...]:
        """Return the slots of which ``rank`` owns elements, in order, in O(log slots)."""
        begin = self._begin_of(rank)
        first = bisect.bisect_right(self.slots, begin, key=lambda slot: slot.end)
        last = bisect.bisect_left(
            self.slots, begin + self.shard_numel, key=lambda slot: slot.offset
        )
        return self.slots[first:last]

    def local_rows(self, slot: Slot, rank: int) -> LocalRows:
        """Return what ``rank`` owns of a slot of this buffer, in O(1)."""
        begin = self._begin_of(rank)
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

    def _begin_of(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank must be in 0..{self.num_ranks - 1}, got {rank}")
        return rank * self.shard_numel


@dataclass(frozen=True)
class UnitLayout:
    """The flat buffers of one unit; each parameter has its slot in one of them.

    Attributes:
        num_ranks: Number of ranks that share the unit.
        buffers: Its flat buffers; none for a unit without parameters.
    """

    num_ranks: int
    buffers: tuple[BufferLayout, ...]
    _places: tuple[tuple[int, Slot], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for number, buffer in enumerate(self.buffers):
            if buffer.num_ranks != self.num_ranks:
                raise ConfigError(
                    f"buffer {number} is for {buffer.num_ranks} ranks, the unit for "
                    f"{self.num_ranks}"
                )
        places = sorted(
            ((number, slot) for number, buffer in enumerate(self.buffers) for slot in buffer.slots),
            key=lambda place: place[1].index,
        )
        indices = [slot.index for _, slot in places]
        if indices != list(range(len(indices))):
            raise ConfigError(
                f"the slots of a unit must hold the parameters 0..{len(indices) - 1} once each, "
                f"got {indices}"
            )
        object.__setattr__(self, "_places", tuple(places))

    def place(self, index: int) -> tuple[int, Slot]:
        """Return the number of the buffer that holds a parameter, and its slot there, in O(1)."""
        if not 0 <= index < len(self._places):
            raise ConfigError(
                f"the unit has {len(self._places)} parameters, there is none of index {index}"
            )
        return self._places[index]

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return len(self._places)

    @property
    def shard_numel(self) -> int:
        """Number of elements of one rank's shards of all buffers, padding included."""
        return sum(buffer.shard_numel for buffer in self.buffers)

    @property
    def total_numel(self) -> int:
        """Number of elements of all buffers on all ranks, padding included."""
        return sum(buffer.total_numel for buffer in self.buffers)

    @property
    def num_padding(self) -> int:
        """Number of elements that belong to no parameter, over all buffers and ranks."""
        return sum(buffer.num_padding for buffer in self.buffers)


def describe(layout: UnitLayout, names: Sequence[str] | None = None) -> str:
    """Return the layout as text: for each parameter its place and the rows of each rank.

    Args:
        layout: What to describe.
        names: Full names of the parameters, in order; their numbers if None.
    """
    if names is None:
        names = [f"parameter {index}" for index in range(layout.num_params)]
    if len(names) != layout.num_params:
        raise ConfigError(f"the unit has {layout.num_params} parameters, got {len(names)} names")
    lines = []
    for number, buffer in enumerate(layout.buffers):
        lines.append(
            f"buffer {number}: {buffer.num_ranks} ranks x {buffer.shard_numel} elements, "
            f"{buffer.num_padding} of {buffer.total_numel} are padding"
        )
        for slot in buffer.slots:
            what = f"  [{slot.offset}, {slot.end}) {names[slot.index]} {list(slot.shape)}: "
            lines.append(what + (_owners(buffer, slot) or "no rows"))
    return "\n".join(lines)


def _owners(buffer: BufferLayout, slot: Slot) -> str:
    """Return the ranks that own rows of a slot; all but the first and the last own the same."""
    ranks = buffer.ranks_of(slot)
    inner = ranks[1:-1]
    parts = []
    for part in (ranks[:1], inner, ranks[1:][-1:]):
        if part:
            rows = buffer.local_rows(slot, part[0])
            end_row = rows.first_row + rows.num_rows * len(part)
            who = f"rank {part[0]}" if len(part) == 1 else f"ranks {part[0]} to {part[-1]}"
            each = f", {rows.num_rows} each" if len(part) > 1 else ""
            parts.append(f"{who} rows [{rows.first_row}, {end_row}){each}")
    return "; ".join(parts)
