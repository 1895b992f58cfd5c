"""What a recording consists of: values, each a way to look at a storage, and nodes over them."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp.base.op_tensors import OpCall, is_empty, storage_key
from graphfsdp.base.torch_internals import OpOverload, key_of, storage_behind
from graphfsdp.errors import CaptureError, HazardKind, Refuse, SourceLine, raised

_NUM_FREED = 64  # at the most, before they are let go of


@dataclass(eq=False, slots=True)
class StorageInfo:
    """One storage.

    Attributes:
        ref: Weak reference; while it exists, torch cannot reuse the storage's identity. None of
            one that the iteration has made and freed, see Note [Holes in the heap].
        external: It existed before the recording.
        varies: Its contents differ from replay to replay, because they derive from an existing
            tensor or from the RNG. Constants made inside the iteration do not vary.
        filled: Some operator, or somebody before the recording, has written contents into it.
        first_use: The user's line at which an external storage was first seen.
        is_written: Some operator of the recording has written into it.
    """

    ref: StorageWeakRef | None
    external: bool
    varies: bool
    filled: bool = True
    first_use: SourceLine | None = None
    is_written: bool = False

    @property
    def alive(self) -> bool:
        """Whether anything but this recording still holds the storage."""
        return self.ref is not None and not self.ref.expired()

    @property
    def key(self) -> int:
        """The storage's identity (``storage_key``); 0 where it may be another's by now."""
        return 0 if self.ref is None else self.ref.cdata

    def get(self) -> torch.UntypedStorage:
        """ReferenceError if it has been freed."""
        storage = None if self.ref is None else storage_behind(self.ref)
        if storage is None:
            raise ReferenceError("the storage has been freed")
        return storage


def storage_of(tensor: Tensor, op: str) -> torch.UntypedStorage:
    """CaptureError if there is none (sparse and other special layouts)."""
    if not storage_key(tensor):
        raise CaptureError(
            f"a tensor of layout {tensor.layout} has no storage that a graph could hold at a "
            "fixed address. Remedy: use strided (dense) tensors inside the iteration",
            op=op,
            kind=HazardKind.MEMORY,
        )
    return tensor.untyped_storage()


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return all of a storage, [B] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def contents_digest(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    numbers: Any = plain.reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(memoryview(numbers)).digest()


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last that a strided tensor looks at."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class StorageTable:
    """All storages that were seen, and by their identities those that may be seen again.

    Note [Holes in the heap]: a weak reference keeps some bytes of a storage that was freed, in the
    middle of the heap. A few thousand of them between the freed activations of an iteration keep
    malloc from joining what is free: the peak of a process was up to 1.4 times as high. So what the
    iteration has made and freed is let go of, some storages at a time.
    """

    def __init__(self) -> None:
        self._all: list[StorageInfo] = []
        self._infos: dict[int, StorageInfo] = {}
        self._made: dict[int, StorageInfo] = {}  # likewise, by the iteration
        self._most_made = _NUM_FREED

    def find(self, tensor: Tensor, op: str) -> StorageInfo | None:
        return self._infos.get(key_of(storage_of(tensor, op)))

    def get(self, key: int) -> StorageInfo | None:
        """Return the storage of a ``storage_key``."""
        return self._infos.get(key)

    def has(self, tensor: Tensor) -> bool:
        """Tell whether the storage of a tensor is registered; one that vmap has left has none."""
        return storage_key(tensor) in self._infos

    def add(self, tensor: Tensor, op: str, *, external: bool, varies: bool) -> StorageInfo:
        """Register the storage of a tensor that was never seen before."""
        storage = storage_of(tensor, op)
        info = StorageInfo(StorageWeakRef(storage), external, varies)
        self._all.append(info)
        self._infos[key_of(storage)] = info
        if not external:
            self._made[key_of(storage)] = info
            if len(self._made) > self._most_made:
                self._let_go()
        return info

    def _let_go(self) -> None:
        for key in [key for key, info in self._made.items() if not info.alive]:
            self._made.pop(key).ref = None
            del self._infos[key]
        self._most_made = len(self._made) + _NUM_FREED

    def known(self, tensor: Tensor, op: str, *, external: bool, varies: bool) -> StorageInfo:
        """Return the storage of a tensor, which is registered if it was never seen before."""
        return self.find(tensor, op) or self.add(tensor, op, external=external, varies=varies)

    def __iter__(self) -> Iterator[StorageInfo]:
        return iter(self._all)


def refuse_dropped_tensors(storages: Iterable[StorageInfo], refuse: Refuse = raised) -> None:
    """Refuse each tensor from before the iteration that it used and then let go.

    Whoever does that has put a new tensor in its place for the next iteration to read (a running
    average kept by assignment, say); a replay would read the old one, or freed memory, for ever.
    """
    for info in storages:
        if info.external and not info.alive:
            refuse(
                CaptureError(
                    "the iteration read a tensor that existed before it and then dropped it: "
                    "either a new tensor was assigned in its place (a replay would go on reading "
                    "the old one), or it was made outside torch's operators (torch.from_numpy). "
                    "Remedy: update kept tensors in place (copy_, mul_, add_), and make constants "
                    "outside the iteration",
                    source=info.first_use,
                )
            )


_LISTS = (list, tuple)
# By id of a StorageInfo: which node does more with it than look at it, from which byte to which.
Touches = Mapping[int, Sequence[tuple[int, int, int]]]
Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]


@dataclass(eq=False, slots=True)
class Value:
    """One way to look at one storage: what a tensor of the iteration is to the program.

    Attributes:
        geometry: Offset, shape, strides, dtype, conjugate bit, negative bit.
        node: Index of the node that makes it; None if it can be made before any node runs.
    """

    storage: StorageInfo
    geometry: Geometry
    node: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.geometry[1])


@dataclass(eq=False, slots=True)
class Node:
    """One operator call of the program.

    Attributes:
        args: Its arguments; every tensor replaced by its Value.
        kwargs: Likewise.
        outputs: Values of its results, in order; None for what is not a tensor.
        results: "none", "tensor" or "list": the form of what the operator returns.
        effects: It must run even when nobody uses its results.
        site: Number of the place in the user's program that it comes from.
        inputs: The Values among its arguments, lists opened.
    """

    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Value | None]
    results: str
    effects: bool = True
    site: int = 0
    inputs: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = values_among([*self.args, *self.kwargs.values()])

    @classmethod
    def of(cls, call: OpCall, value_of: Callable[[Tensor], "Value | None"], site: int) -> "Node":
        """Return the node of a call that has not run yet."""
        args = replaced(call.args, Tensor, value_of)
        kwargs = {name: replaced(item, Tensor, value_of) for name, item in call.kwargs.items()}
        return cls(call.op, args, kwargs, [], "none", site=site)

    @property
    def call(self) -> OpCall:
        """The call, with Values in the place of tensors."""
        return OpCall(self.op, self.args, self.kwargs)

    @property
    def written(self) -> list[Value]:
        """The Values that it writes into, as its operator says."""
        return values_among(self.call.written_arguments())

    @property
    def made(self) -> list[Value]:
        """The Values that it returns."""
        return [value for value in self.outputs if value is not None]

    @property
    def values(self) -> list[Value]:
        return [*self.inputs, *self.made]


def geometry_of(tensor: Tensor) -> Geometry:
    return (
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def replaced(item: Any, kind: type, other: Callable[[Any], Any]) -> Any:
    """Return an argument with ``other`` of what is of a kind in its place, lists opened."""
    if isinstance(item, kind):
        return other(item)
    if isinstance(item, _LISTS):
        return [replaced(member, kind, other) for member in item]
    return item


def values_among(items: Iterable[Any]) -> list[Value]:
    """Return the Values in arguments, lists opened."""
    found: list[Value] = []
    for item in items:
        if isinstance(item, Value):
            found.append(item)
        elif isinstance(item, list):
            found += values_among(item)
    return found


def span_bytes(value: Value) -> int:
    """Return the bytes from the start of a value's storage to the end of the value."""
    offset, shape, stride, dtype, *_ = value.geometry
    length = span(shape, stride)
    return (offset + length) * dtype.itemsize if length else 0


def touches_of(nodes: Sequence[Node]) -> Touches:
    """Return which nodes do more with a storage than look at it."""
    touches: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, node in enumerate(nodes):
        given = {id(value.storage) for value in node.inputs}
        made = {id(value.storage) for value in node.made}
        if (node.effects or not made or not made <= given) and not is_empty(node.op):
            for value in node.inputs:
                touches[id(value.storage)].append((index, *places(value)))
    return touches


def before(touches: Touches, value: Value, until: int) -> list[int]:
    """Return which nodes before one touch memory that a value looks at."""
    begin, end = places(value)
    touched = touches.get(id(value.storage), ())
    return [at for at, low, high in touched if at < until and low < end and begin < high]


def places(value: Value) -> tuple[int, int]:
    """Return the first byte of its storage that a value looks at, and that behind the last."""
    return value.geometry[0] * value.geometry[3].itemsize, span_bytes(value)


def is_whole(value: Value, num_bytes: int) -> bool:
    """Tell whether a value is all of its storage, without gaps, conjugation or negation."""
    return is_plain(value) and 0 < value.numel * value.geometry[3].itemsize == num_bytes


def is_plain(value: Value) -> bool:
    offset, _, _, _, conj, neg = value.geometry
    return offset == 0 and not conj and not neg


def materialise(value: Value, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
    """Return a tensor that looks at ``storage`` as the value does at its own.

    ``first_byte`` is where the value's own storage begins in it.
    """
    offset, shape, stride, dtype, conj, neg = value.geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset + first_byte // dtype.itemsize, shape, stride)
    if conj:
        tensor = tensor.conj()
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor
