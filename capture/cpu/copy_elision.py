"""Finds copies that a program need not make: a result computed where it was to be copied to.

A gradient is computed, then copied into its persistent buffer, and that is all that happens to
it. Where nothing else looks at the buffer in between, the operator can write there at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphfsdp._capture.trace.values import Node, Value, span_bytes, values_in
from graphfsdp.base.memory_plan import ALIGNMENT_BYTES


@dataclass(frozen=True)
class Elision:
    """A copy that falls away.

    Attributes:
        copy: The node that made it.
        storage: Where the copied storage lies from now on.
        first_byte: And from which byte on.
    """

    copy: Node
    storage: torch.UntypedStorage
    first_byte: int


def elide_copies(
    nodes: Sequence[Node],
    uses: Mapping[int, tuple[int, int]],
    sizes: Mapping[int, int],
    scratch: Sequence[Tensor],
) -> dict[int, Elision]:
    """Return the storages whose contents can be computed in the place that they are copied to.

    Args:
        nodes: The program.
        uses: First and last node that touch each planned storage, by id of its StorageInfo.
        sizes: Bytes of each.
        scratch: Tensors whose old contents nobody needs, not even to undo a replay that failed
            before it came to the copy; only copies to these are elided.

    Returns:
        The elisions by id of the StorageInfo. Each storage is dense, is copied as a whole by the
        last node that touches it, and has the geometry of the target, which lies outside the
        iteration, is aligned like all memory of torch, and is not touched while the storage is
        in use.
    """
    targets = {tensor.untyped_storage()._cdata for tensor in scratch}
    touched = _external_uses(nodes)
    found: dict[int, Elision] = {}
    for index, node in enumerate(nodes):
        if str(node.op) != "aten.copy_.default":
            continue
        target, source = node.args[0], node.args[1]
        if not isinstance(source, Value) or not target.storage.external:
            continue
        key = id(source.storage)
        if key not in uses or uses[key][1] != index or not _is_whole(source, sizes[key]):
            continue
        if source.geometry[1:] != target.geometry[1:]:
            continue
        storage = target.storage.get()
        if storage._cdata not in targets:
            continue
        first_byte = target.geometry[0] * target.geometry[3].itemsize
        low = storage.data_ptr() + first_byte
        if low % ALIGNMENT_BYTES:
            continue  # no kernel shall see a place that eager mode would not give it
        high = low + sizes[key]
        window = range(uses[key][0], index)
        if any(step in window and begin < high and low < end for step, begin, end in touched):
            continue
        found[key] = Elision(node, storage, first_byte)
    return found


def _is_whole(value: Value, num_bytes: int) -> bool:
    """Tell whether a value is all of its storage, without gaps, conjugation or negation."""
    offset, shape, _, dtype, conj, neg = value.geometry
    numel = 1
    for size in shape:
        numel *= size
    return offset == 0 and not conj and not neg and 0 < numel * dtype.itemsize == num_bytes


def _external_uses(nodes: Sequence[Node]) -> list[tuple[int, int, int]]:
    """Return which node touches which addresses outside the iteration: step, begin, end."""
    found = []
    for index, node in enumerate(nodes):
        for value in (*values_in(node), *node.outputs):
            if value is not None and value.storage.external:
                address = value.storage.get().data_ptr()
                begin = value.geometry[0] * value.geometry[3].itemsize
                found.append((index, address + begin, address + span_bytes(value)))
    return found
