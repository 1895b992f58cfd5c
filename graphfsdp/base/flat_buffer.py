"""One 1-D storage and the views into it that stay at their addresses for ever."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from graphfsdp.base.host_memory import zeros_flat
from graphfsdp.base.torch_internals import foreach_copy_

VECTOR_BYTES = 16  # widest vector load of a GPU thread
# torch launches its kernel for many tensors anew behind 320 pieces of 65,536 elements each.
_NUMEL_OF_LAUNCH = 320 * 65536


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


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether a tensor of these strides fills a stretch of memory without gap or overlap."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if size == 0:
            return True
        if step != expected:
            return False
        expected *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others.

    Capture: on a GPU a kernel for each sixty or so that have the same dtypes and strides as their
        targets, in place of a node for each; all others one by one, and those that would take more
        than one launch of that kernel.
    """
    together: dict[tuple[torch.dtype, torch.dtype] | None, list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        form = target.shape, target.stride()
        alike = form == (source.shape, source.stride()) and is_dense(*form)
        is_among = target.is_cuda and alike and target.numel() <= _NUMEL_OF_LAUNCH
        key = (target.dtype, source.dtype) if is_among else None
        together.setdefault(key, []).append((target, source))
    for key, pairs in together.items():
        if key is not None and len(pairs) > 1:
            foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])
        else:
            for target, source in pairs:
                target.copy_(source)


class FlatBuffer:
    """Views for a list of tensors in one zero-filled 1-D storage, in the same order.

    A view has its tensor's shape, and its strides too where these are dense (channels_last
    weights), so that elementwise kernels can run over the flat storage of both.
    """

    def __init__(self, like: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
        starts = neighbour_starts((tensor.numel() for tensor in like), dtype.itemsize)
        self.flat = zeros_flat(starts[-1], dtype, device)
        views = []
        for start, tensor in zip(starts, like, strict=False):
            is_kept = is_dense(tensor.shape, tensor.stride())
            stride = tensor.stride() if is_kept else contiguous_stride(tensor.shape)
            views.append(self.flat.as_strided(tensor.shape, stride, start))
        self.views = tuple(views)

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()
