"""Decides which storages of a recording get fixed memory, and makes the tensors over it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.cpu.arena import Arena
from graphfsdp._capture.cpu.copy_elision import elide_copies
from graphfsdp._capture.cpu.out_calls import can_write_into
from graphfsdp._capture.trace.op_tensors import is_empty
from graphfsdp._capture.trace.values import (
    Node,
    Value,
    geometry_of,
    materialise,
    span_bytes,
    values_in,
)
from graphfsdp.base.memory_plan import Lifetime, MemoryPlan, plan_memory

_FOLDED_BYTES = 1 << 16  # larger constants are made anew in each replay: memory counts more

_Place = tuple[torch.UntypedStorage, int]  # a storage, and the first byte in it


class ProgramMemory:
    """Where every storage of a program lies: fixed for most, allocated by replays for the rest.

    Note [Planned memory]: an operator with a true ``out=`` form (out_calls.py) computes straight
    into its place in one arena, which is the CPU twin of a CUDA graph's private pool. So a replay
    neither allocates nor frees it, and all views of it are made once, when the program is built.
    What other operators return is allocated as in eager mode, and so is what the caller keeps.

    Attributes:
        plan: Places of the planned storages.
        pool: [B] uint8 memory of the planned storages.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        escapes: Sequence[Value],
        scratch: Sequence[Tensor],
        arena: Arena,
        bare: Sequence[Value] = (),
    ) -> None:
        """Plan.

        Args:
            nodes: The program, without dead nodes.
            outputs: Results that belong to the caller; their storages are not planned.
            escapes: Results that are copied into storages outside at the end.
            scratch: Tensors from before the recording that may be written earlier than it did.
            arena: Memory for the planned storages.
            bare: What no node makes, and nodes use for themselves; see Note [Scratch].
        """
        self._kept = {id(value.storage) for value in outputs}
        self._ends = {id(value.storage) for value in escapes}
        self._places: dict[int, _Place] = {}  # by id of the StorageInfo
        self._tensors: dict[int, Tensor] = {}  # by id of the Value
        self._makers = _makers(nodes)
        self._folded = self._fold(nodes)
        planned = self._planned(nodes) | {id(value.storage) for value in bare}
        sizes, uses = self._sizes(nodes, planned), self._uses(nodes, planned)
        elisions = elide_copies(nodes, uses, sizes, scratch)
        self._elided = {id(elision.copy) for elision in elisions.values()}
        for key, elision in elisions.items():
            self._places[key] = (elision.storage, elision.first_byte)
        self._lives = {
            key: Lifetime(first, len(nodes) if key in self._ends else last, sizes[key])
            for key, (first, last) in uses.items()
            if key not in elisions
        }
        self._into = {*self._lives, *elisions}
        lifetimes = list(self._lives.values())
        self.plan: MemoryPlan = plan_memory(lifetimes)
        storage = arena.reserve(self.plan.num_bytes)
        self.pool = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.plan.num_bytes,), (1,))
        for key, offset in zip(self._lives, self.plan.offsets, strict=True):
            self._places[key] = (storage, offset)

    def is_fixed(self, value: Value) -> bool:
        """Tell whether a value lies at one address for ever, so that its tensor is a constant."""
        return value.storage.external or id(value.storage) in self._places

    def tensor(self, value: Value) -> Tensor:
        """Return the tensor of a value that is fixed."""
        tensor = self._tensors.get(id(value))
        if tensor is None:
            place = self._places.get(id(value.storage)) or (value.storage.get(), 0)
            tensor = self._tensors[id(value)] = materialise(value, *place)
        return tensor

    def writes_into_place(self, node: Node) -> bool:
        """Tell whether a node makes storages and all of them are planned."""
        return any(
            value is not None
            and self._makers.get(id(value.storage)) is node
            and id(value.storage) in self._into
            for value in node.outputs
        )

    def needs_no_call(self, node: Node) -> bool:
        """Tell whether a node is over when the program is built: a view, a constant, a copy."""
        if id(node) in self._elided:
            return True
        if node.effects or not node.outputs:
            return False
        if id(node) in self._folded:
            return True
        if any(value is None or not self.is_fixed(value) for value in node.outputs):
            return False
        return is_empty(node.op) or not self.writes_into_place(node)

    def elided_address(self, value: Value) -> int | None:
        """Return where the storage of a value begins that is computed where it was to be copied."""
        key = id(value.storage)
        if key in self._lives or key not in self._into:
            return None
        storage, first_byte = self._places[key]
        return storage.data_ptr() + first_byte

    def offsets(self) -> dict[int, int]:
        """Return the first byte in the arena of each planned storage, by id of its info."""
        return dict(zip(self._lives, self.plan.offsets, strict=True))

    def dead_after(self, step: int) -> list[Tensor]:
        """Return the memory, as bytes, of the planned storages whose last use is a step."""
        return [
            self.pool[offset : offset + life.num_bytes]
            for life, offset in zip(self._lives.values(), self.plan.offsets, strict=True)
            if life.end == step and life.num_bytes
        ]

    def free_from(self, step: int) -> list[Tensor]:
        """Return the memory, as bytes, in which nothing is alive from a step on."""
        lives = zip(self._lives.values(), self.plan.offsets, strict=True)
        taken = sorted((at, at + life.num_bytes) for life, at in lives if life.end >= step)
        gaps, start = [], 0
        for first, end in [*taken, (self.plan.num_bytes, self.plan.num_bytes)]:
            if first > start:
                gaps.append(self.pool[start:first])
            start = max(start, end)
        return gaps

    def _fold(self, nodes: Sequence[Node]) -> set[int]:
        """Run the nodes that compute the same from constants in every replay, once and for all."""
        written = {
            id(value.storage)
            for node in nodes
            if node.effects
            for value in (*values_in(node), *node.outputs)
            if value is not None
        }
        folded: set[int] = set()
        for node in nodes:
            made = [value for value in node.outputs if value is not None]
            if node.effects or node.results != "tensor" or is_empty(node.op):
                continue
            keys = {id(value.storage) for value in made}
            if any(value.storage.external for value in made) or keys & (written | self._kept):
                continue
            if any(self._makers[key] is not node for key in keys) or keys & self._ends:
                continue
            if any(id(value.storage) not in self._places for value in values_in(node)):
                continue
            if sum(span_bytes(value) for value in made) > _FOLDED_BYTES:
                continue
            result = self._run(node)
            if geometry_of(result) != made[0].geometry:
                continue
            self._places[id(made[0].storage)] = (result.untyped_storage(), 0)
            folded.add(id(node))
        return folded

    def _run(self, node: Node) -> Tensor:
        kwargs = {name: self._filled(value) for name, value in node.kwargs.items()}
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            result: Tensor = node.op(*[self._filled(value) for value in node.args], **kwargs)
        return result

    def _filled(self, item: Any) -> Any:
        """Return an argument with the tensors of fixed values in it."""
        if isinstance(item, Value):
            return self.tensor(item)
        return [self._filled(entry) for entry in item] if isinstance(item, list) else item

    def _planned(self, nodes: Sequence[Node]) -> set[int]:
        planned: set[int] = set()
        for node in nodes:
            if id(node) in self._folded:
                continue
            made = {
                id(value.storage): value
                for value in node.outputs
                if value is not None and self._makers.get(id(value.storage)) is node
            }
            if not made or len(made) != len(node.outputs):
                continue
            if any(key in self._kept for key in made) or not all(map(_is_plain, made.values())):
                continue
            if can_write_into(node.op):
                planned |= set(made)
        return planned

    def _sizes(self, nodes: Sequence[Node], planned: set[int]) -> dict[int, int]:
        """Return the bytes of each planned storage."""
        sizes = dict.fromkeys(planned, 0)
        for node in nodes:
            for value in (*values_in(node), *node.outputs):
                if value is not None and id(value.storage) in sizes:
                    key = id(value.storage)
                    sizes[key] = max(sizes[key], span_bytes(value))
        return sizes

    def _uses(self, nodes: Sequence[Node], planned: set[int]) -> dict[int, tuple[int, int]]:
        """Return the first and the last node of a replay that touch each planned storage."""
        uses: dict[int, tuple[int, int]] = {}
        for index, node in enumerate(nodes):
            made = {key for key in map(_storage_key, node.outputs) if key in planned}
            makes = any(self._makers[key] is node for key in made)
            if not node.effects and (is_empty(node.op) or (not makes and made)):
                continue  # bare memory, or a view of what is planned: made before the replay
            for value in (*values_in(node), *node.outputs):
                if (key := _storage_key(value)) in planned:
                    uses[key] = (uses.get(key, (index, index))[0], index)
        return uses


def _makers(nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node that makes each storage of the program, by id of the StorageInfo."""
    makers: dict[int, Node] = {}
    for node in nodes:
        for value in node.outputs:
            if value is not None and not value.storage.external:
                makers.setdefault(id(value.storage), node)
    return makers


def _storage_key(value: Value | None) -> int:
    return 0 if value is None else id(value.storage)


def _is_plain(value: Value) -> bool:
    offset, _, _, _, conj, neg = value.geometry
    return offset == 0 and not conj and not neg
