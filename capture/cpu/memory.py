"""Where every storage of a program lies: one plan for all, made when the program is built."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.cpu.calls import can_write_into
from graphfsdp._capture.trace.values import (
    Node,
    Value,
    before,
    is_plain,
    is_whole,
    materialise,
    places,
    span_bytes,
    touches_of,
)
from graphfsdp.base.memory import advise_huge_pages, round_up
from graphfsdp.base.op_tensors import is_empty
from graphfsdp.base.torch_internals import key_of, storage_behind

ALIGNMENT_BYTES = 64  # what torch's allocator gives, so that no kernel sees other addresses
_GOOD = 1.02  # bytes of a plan over the most bytes alive at which no better one is looked for
_Place = tuple[torch.UntypedStorage, int]  # a storage, and the first byte in it


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


class Arena:
    """One storage that grows in place.

    Note [Shared arena]: the graphs of one captured step (a graph for each signature, another for
    evaluation) never run at a time, and none reads what another left. So all of them plan their
    memory from the first byte of the same storage, and together they need what the largest needs.
    A storage that grows moves, but tensors follow their storage: programs built before stay valid.
    """

    def __init__(self) -> None:
        # The programs hold the storage, so that it goes with the last of them.
        self._storage: StorageWeakRef | None = None

    @property
    def num_bytes(self) -> int:
        storage = self._alive()
        return 0 if storage is None else storage.nbytes()

    def reserve(self, num_bytes: int) -> torch.UntypedStorage:
        """Return the storage, which has at least ``num_bytes``; contents are lost if it grows."""
        storage = self._alive()
        if storage is None:
            storage = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
            advise_huge_pages(storage)
            self._storage = StorageWeakRef(storage)
        elif storage.nbytes() < num_bytes:
            self._renew(storage, num_bytes)
        return storage

    def give_back_pages(self) -> None:
        """Let the system have the memory until a program runs again, and all that is free."""
        storage = self._alive()
        if storage is not None:
            self._renew(storage, storage.nbytes())
        give_back_freed_pages()

    def _renew(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        before = storage.nbytes()
        storage.resize_(0)  # so that old and new memory are never there together
        try:
            storage.resize_(num_bytes)
        finally:
            if storage.nbytes() < before:  # no memory for more; programs go on writing into this
                storage.resize_(before)
            advise_huge_pages(storage)

    def _alive(self) -> torch.UntypedStorage | None:
        storage = None if self._storage is None else storage_behind(self._storage)
        # An operator that takes what lies in it to NumPy has torch resize it no more.
        return storage if storage is not None and storage.resizable() else None


def give_back_freed_pages() -> None:
    """Let the system have the heap's pages that nobody uses, where it keeps them otherwise."""
    # glibc only; elsewhere the peak is a little higher.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class ProgramMemory:
    """Where every storage of a program lies: fixed for most, allocated by replays for the rest.

    Note [Planned memory]: an operator with a true ``out=`` form (calls.py) computes straight
    into its place in one arena, which is the CPU twin of a CUDA graph's private pool. So a replay
    neither allocates nor frees it, and all views of it are made once, when the program is built.
    What other operators return is allocated as in eager mode, and so is what the caller keeps.

    Attributes:
        pool: [B] uint8 memory of the planned storages.
        landed: By id of the StorageInfo, those that are computed where they outlive the iteration.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        escapes: Sequence[Value],
        scratch: Sequence[Tensor],
        arena: Arena,
        landing: Sequence[Tensor] = (),
    ) -> None:
        """Plan for ``nodes``, none of them dead.

        The storages of ``outputs`` belong to the caller and are not planned; ``escapes`` are copied
        out at the end, or computed where they outlive the iteration, if that is given as
        ``landing``; ``scratch`` may be written earlier than the recording did.
        """
        ends = zip((id(value.storage) for value in escapes), landing, strict=False)
        landed = {key: (tensor.untyped_storage(), 0) for key, tensor in ends}
        self._kept = {id(value.storage) for value in outputs}
        self._ends = {id(value.storage) for value in escapes}
        self._places: dict[int, _Place] = {}  # by id of the StorageInfo
        self._tensors: dict[int, Tensor] = {}  # by id of the Value
        self._makers: dict[int, Node] = {}  # of storages of the iteration, likewise
        for node in nodes:
            for value in node.made:
                if not value.storage.external:
                    self._makers.setdefault(id(value.storage), node)
        touched = (value.storage for node in nodes for value in node.values)
        self._external = {id(info): info for info in touched if info.external}.values()
        lives = self._lifetimes(nodes, self._planned(nodes))
        elided = _elided_copies(nodes, lives, scratch)
        self.landed = landed.keys() & (lives.keys() - elided.keys())
        self._lives = {
            key: life for key, life in lives.items() if key not in elided and key not in self.landed
        }
        self._into = set(lives)
        self._elided = {key: (storage, byte) for key, (_, storage, byte) in elided.items()}
        self._over = {id(node) for node, *_ in elided.values()}
        self.plan: MemoryPlan = plan_memory(list(self._lives.values()))
        storage = arena.reserve(self.plan.num_bytes)
        self.pool = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.pool.set_(storage, 0, (self.plan.num_bytes,), (1,))
        places = {key: (storage, offset) for key, offset in self.offsets().items()}
        self._places |= places | self._elided | {key: landed[key] for key in self.landed}

    def is_fixed(self, value: Value) -> bool:
        """Tell whether a value lies at one address for ever, so that its tensor is a constant."""
        return value.storage.external or id(value.storage) in self._places

    def tensor(self, value: Value) -> Tensor:
        tensor = self._tensors.get(id(value))
        if tensor is None:
            place = self._places.get(id(value.storage)) or (value.storage.get(), 0)
            tensor = self._tensors[id(value)] = materialise(value, *place)
        return tensor

    def writes_into_place(self, node: Node) -> bool:
        """Tell whether a node makes storages and all of them are planned."""
        return any(
            self._makers.get(id(value.storage)) is node and id(value.storage) in self._into
            for value in node.made
        )

    def needs_no_call(self, node: Node) -> bool:
        """Tell whether a node is over when the program is built: a view, a copy."""
        if id(node) in self._over:
            return True
        if node.effects or not node.outputs:
            return False
        if any(value is None or not self.is_fixed(value) for value in node.outputs):
            return False
        return is_empty(node.op) or not self.writes_into_place(node)

    def addresses(self) -> dict[int, int]:
        """Return where storages begin that are not planned, by id of the info.

        These are from before the iteration, or their contents are computed where they were to be
        copied.
        """
        found = {id(info): info.get().data_ptr() for info in self._external}
        return found | {key: s.data_ptr() + first for key, (s, first) in self._elided.items()}

    def offsets(self) -> dict[int, int]:
        """Return the first byte in the arena of each planned storage, by id of its info."""
        return dict(zip(self._lives, self.plan.offsets, strict=True))

    def _planned(self, nodes: Sequence[Node]) -> set[int]:
        planned: set[int] = set()
        for node in nodes:
            made = {
                id(value.storage): value
                for value in node.made
                if self._makers.get(id(value.storage)) is node
            }
            if not made or len(made) != len(node.outputs):
                continue
            if not made.keys() & self._kept and all(map(is_plain, made.values())):
                planned |= set(made) if can_write_into(node.op) else set()
        return planned

    def _lifetimes(self, nodes: Sequence[Node], planned: set[int]) -> dict[int, Lifetime]:
        sizes = dict.fromkeys(planned, 0)
        uses: dict[int, tuple[int, int]] = {}
        looks: dict[int, Value] = {}
        for index, node in enumerate(nodes):
            values = [value for value in node.values if id(value.storage) in planned]
            looks.update((id(value), value) for value in values)
            made = [value for value in values if value in node.outputs]
            makes = any(self._makers[id(value.storage)] is node for value in made)
            # Bare memory, or a view of what is planned, is made before the replay.
            if node.effects or ((makes or not made) and not is_empty(node.op)):
                for value in values:
                    key = id(value.storage)
                    uses[key] = (uses.get(key, (index, index))[0], index)
        for value in looks.values():
            key = id(value.storage)
            sizes[key] = max(sizes[key], span_bytes(value))
        return {
            key: Lifetime(first, len(nodes) if key in self._ends else last, sizes[key])
            for key, (first, last) in uses.items()
        }


def _elided_copies(
    nodes: Sequence[Node],
    lives: Mapping[int, Lifetime],
    scratch: Sequence[Tensor],
) -> dict[int, tuple[Node, torch.UntypedStorage, int]]:
    """Return the copies that fall away, by id of the StorageInfo that they copy.

    A gradient is computed, then copied into its persistent buffer, and that is all that happens to
    it. Where nothing else looks at the buffer in between, the operator can write there at once.

    With the storage where each would have put what it copies, and the first byte in there.
    ``lives`` is of storages that an operator can compute at another place. Only copies to
    ``scratch`` are elided, whose old contents nobody needs, not even to undo a replay that failed
    before it came to the copy.

    Each storage is dense, is copied as a whole by the last node that touches it, and has the
    geometry of the target, which lies outside the iteration, is aligned, so that no kernel sees a
    place that eager mode would not give it, and is not touched while the storage is in use.
    """
    storages = {key_of(tensor.untyped_storage()) for tensor in scratch}
    touches = touches_of(nodes)
    found: dict[int, tuple[Node, torch.UntypedStorage, int]] = {}
    for index, node in enumerate(nodes):
        if node.op is not torch.ops.aten.copy_.default:
            continue
        target, source = node.args[:2]
        life = lives.get(id(source.storage)) if isinstance(source, Value) else None
        if life is None or life.end != index or not is_whole(source, life.num_bytes):
            continue
        if target.storage.key not in storages or source.geometry[1:] != target.geometry[1:]:
            continue
        storage, first_byte = target.storage.get(), places(target)[0]
        is_aligned = (storage.data_ptr() + first_byte) % ALIGNMENT_BYTES == 0
        if is_aligned and all(step < life.start for step in before(touches, target, index)):
            found[id(source.storage)] = node, storage, first_byte
    return found
