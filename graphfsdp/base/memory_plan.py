"""Places in memory, in integers: borders, neighbours, plans for buffers of known lifetimes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

VECTOR_BYTES = 16  # widest vector load of a GPU thread
ALIGNMENT_BYTES = 64  # what torch's allocator gives, so that no kernel sees other addresses
_GOOD = 1.02  # bytes of a plan over the most bytes alive at which no better one is looked for


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def alignment_numel(itemsize: int) -> int:
    """Return how many elements of ``itemsize`` bytes lie between two 16-byte borders."""
    return VECTOR_BYTES // itemsize


def neighbour_starts(numels: Iterable[int], itemsize: int) -> list[int]:
    """Where pieces start in one storage, on 16-byte borders, and the last one ends, in elements."""
    step = alignment_numel(itemsize)
    starts = [0]
    for numel in numels:
        starts.append(round_up(starts[-1] + numel, step))
    return starts


@dataclass(frozen=True)
class Lifetime:
    start: int  # first step that touches it
    end: int  # last step that touches it; in that step it may not share its place
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    offsets: tuple[int, ...]  # first byte of each buffer, in the order of the lifetimes
    num_bytes: int
    peak_bytes: int  # the most bytes that live at a time; no plan can be smaller


def plan_memory(lifetimes: Sequence[Lifetime]) -> MemoryPlan:
    """Place every buffer so that no two that live at a time overlap.

    Greedy: one after the other, each at the lowest offset that is free during its life. Which
    order is best depends on the program: a few are tried (the last of them is the left-edge
    algorithm's), until a result is at most 2 % above ``peak_bytes``; else the smallest is taken.
    Finding the smallest plan is NP-hard; on recorded training iterations this one is mostly within
    a few percent of ``peak_bytes``.

    Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
        greedy by size; the same as offset calculation in two-dimensional strip packing.
    """
    sizes = [round_up(lifetime.num_bytes, ALIGNMENT_BYTES) for lifetime in lifetimes]
    peak = _peak(lifetimes, sizes)
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda index: (-sizes[index], lifetimes[index].start),
        lambda index: (lifetimes[index].start - lifetimes[index].end, -sizes[index]),
        lambda index: (lifetimes[index].start, -sizes[index]),
    )
    tried = []
    for order in orders:
        sequence = sorted(range(len(sizes)), key=order)
        offsets = _place(lifetimes, sizes, sequence)
        total = max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)
        tried.append((total, offsets))
        if total <= _GOOD * peak:
            break
    total, offsets = min(tried, key=lambda attempt: attempt[0])
    return MemoryPlan(tuple(offsets), total, peak)


def _peak(lifetimes: Sequence[Lifetime], sizes: Sequence[int]) -> int:
    changes: dict[int, int] = {}
    for lifetime, size in zip(lifetimes, sizes, strict=True):
        changes[lifetime.start] = changes.get(lifetime.start, 0) + size
        changes[lifetime.end + 1] = changes.get(lifetime.end + 1, 0) - size
    level = peak = 0
    for step in sorted(changes):
        level += changes[step]
        peak = max(peak, level)
    return peak


def _place(lifetimes: Sequence[Lifetime], sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    offsets = [0] * len(sizes)
    # Of what is placed, by offset: a long iteration has tens of thousands, and each is compared
    # with all before it, in one call of NumPy for a column.
    placed = np.zeros((4, len(sizes)), dtype=np.int64)
    num_placed = 0
    for index in order:
        size, start, end = sizes[index], lifetimes[index].start, lifetimes[index].end
        if size == 0:
            continue
        lows, highs, firsts, lasts = placed[:, :num_placed]
        meets = (firsts <= end) & (lasts >= start)
        reach = np.maximum.accumulate(np.concatenate(([0], highs[meets])))  # up to each gap
        gaps = lows[meets] - reach[:-1] >= size
        offset = int(reach[np.argmax(gaps)] if gaps.any() else reach[-1])
        offsets[index] = offset
        place = int(np.searchsorted(lows, offset))
        placed[:, place + 1 : num_placed + 1] = placed[:, place:num_placed].copy()
        placed[:, place] = offset, offset + size, start, end
        num_placed += 1
    return offsets
