"""Copies that fall away because what they copy can be computed where they put it.

A gradient is computed, then copied into its persistent buffer, and that is all that happens to it.
Where nothing else looks at the buffer in between, the operator can write there at once.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphfsdp._capture.trace.values import Node, Value, span_bytes
from graphfsdp.base.memory_plan import Lifetime
from graphfsdp.base.op_tensors import is_empty
from graphfsdp.base.torch_internals import key_of

# By id of a StorageInfo: which node does more with it than look at it, from which byte to which.
Touches = Mapping[int, Sequence[tuple[int, int, int]]]


def elided_copies(
    nodes: Sequence[Node],
    lives: Mapping[int, Lifetime],
    scratch: Sequence[Tensor],
    alignment_bytes: int,
) -> dict[int, tuple[Node, torch.UntypedStorage, int]]:
    """Return the copies that fall away, by id of the StorageInfo that they copy.

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
        is_aligned = (storage.data_ptr() + first_byte) % alignment_bytes == 0
        if is_aligned and all(step < life.start for step in before(touches, target, index)):
            found[id(source.storage)] = node, storage, first_byte
    return found


def touches_of(nodes: Sequence[Node]) -> Touches:
    touches: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, node in enumerate(nodes):
        given = {id(value.storage) for value in node.inputs}
        made = {id(value.storage) for value in node.outputs if value is not None}
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
    _, shape, _, dtype, *_ = value.geometry
    return is_plain(value) and 0 < math.prod(shape) * dtype.itemsize == num_bytes


def is_plain(value: Value) -> bool:
    offset, _, _, _, conj, neg = value.geometry
    return offset == 0 and not conj and not neg
