"""Copies that fall away because what they copy can be computed where they put it.

A gradient is computed, then copied into its persistent buffer, and that is all that happens to it.
Where nothing else looks at the buffer in between, the operator can write there at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphfsdp._capture.trace.values import Node, Value, span_bytes
from graphfsdp.base.memory_plan import Lifetime
from graphfsdp.base.torch_internals import key_of


@dataclass(frozen=True)
class ElidedCopy:
    """A copy that falls away.

    Attributes:
        index: Of its node.
        storage: Where it would have put what it copies.
        first_byte: Where in there.
    """

    index: int
    storage: torch.UntypedStorage
    first_byte: int


def elided_copies(
    nodes: Sequence[Node],
    lives: Mapping[int, Lifetime],
    scratch: Sequence[Tensor],
    alignment_bytes: int,
) -> dict[int, ElidedCopy]:
    """Return the copies that fall away, by id of the StorageInfo that they copy.

    ``lives`` is of storages that an operator can compute at another place. Only copies to
    ``scratch`` are elided, whose old contents nobody needs, not even to undo a replay that failed
    before it came to the copy.

    Each storage is dense, is copied as a whole by the last node that touches it, and has the
    geometry of the target, which lies outside the iteration, is aligned, so that no kernel sees a
    place that eager mode would not give it, and is not touched while the storage is in use.
    """
    storages = {key_of(tensor.untyped_storage()) for tensor in scratch}
    touched = [
        (index, *addresses(value))
        for index, node in enumerate(nodes)
        for value in node.values
        if value.storage.external and value.storage.ref.cdata in storages
    ]
    found: dict[int, ElidedCopy] = {}
    for index, node in enumerate(nodes):
        if node.op is not torch.ops.aten.copy_.default:
            continue
        target, source = node.args[:2]
        life = lives.get(id(source.storage)) if isinstance(source, Value) else None
        if life is None or life.end != index or not is_whole(source, life.num_bytes):
            continue
        if target.storage.ref.cdata not in storages or source.geometry[1:] != target.geometry[1:]:
            continue
        low, high = addresses(target)
        window = range(life.start, index)
        if low % alignment_bytes or any(
            step in window and begin < high and low < end for step, begin, end in touched
        ):
            continue
        storage = target.storage.get()
        found[id(source.storage)] = ElidedCopy(index, storage, low - storage.data_ptr())
    return found


def addresses(value: Value) -> tuple[int, int]:
    start = value.storage.get().data_ptr()
    begin, end = places(value)
    return start + begin, start + end


def places(value: Value) -> tuple[int, int]:
    """Return the first byte of its storage that a value looks at, and that behind the last."""
    return value.geometry[0] * value.geometry[3].itemsize, span_bytes(value)


def is_whole(value: Value, num_bytes: int) -> bool:
    """Tell whether a value is all of its storage, without gaps, conjugation or negation."""
    _, shape, _, dtype, *_ = value.geometry
    return is_plain(value) and 0 < math.prod(shape) * dtype.itemsize == num_bytes


def is_plain(value: Value) -> bool:
    offset, _, _, _, conj, neg = value.geometry
    return offset == 0 and not conj and not neg
