"""Flat buffers, whose views stay at their addresses for ever; large pieces on huge pages; room."""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphfsdp.base.torch_internals import foreach_copy_

_PAGE = 2 << 20  # bytes of a huge page, of x86-64 and of Arm with pages of 4 KiB
# Two huge pages: below, there is nothing to gain.
_SMALLEST_BYTES = 2 * _PAGE
VECTOR_BYTES = 16  # widest vector load of a GPU thread
# torch launches its kernel for many tensors anew behind 320 pieces of 65,536 elements each.
_NUMEL_OF_LAUNCH = 320 * 65536


def zeros_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [numel] zeros.

    Note [Huge pages]: the processor keeps the addresses of some thousand pages at hand. In pages of
    4 KiB those are a few MiB, less than the matrices of one layer, or than the weights, gradients
    and moments that a step streams through at once. torch asks for huge pages only if
    THP_MEM_ALLOC_ENABLE is set. Where the system has none to give, pages are small, as they would
    be anyway.
    """
    found = torch.empty(numel, dtype=dtype, device=device)
    advise_huge_pages(found.untyped_storage())
    return found.zero_()


def advise_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages under memory that torch has freshly allocated, see Note [Huge pages].

    A page that was written to stays as small as it is.
    """
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
    if advice is None or storage.device.type != "cpu" or storage.nbytes() < _SMALLEST_BYTES:
        return
    start = -(-storage.data_ptr() // _PAGE) * _PAGE
    end = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if end > start:
        madvise(start, end - start, advice)  # a kernel without them says so; pages stay small


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what this rank may still take, None where nobody tells; Linux does.

    The least that machine and control groups (containers, Slurm, Kubernetes) leave, shared by the
    ranks of the machine: whoever takes more is killed without a word.
    """
    rooms = _free_of_control_groups(root)
    machine = _fields(root / "proc" / "meminfo").get("MemAvailable:")
    if machine is not None:
        rooms.append(machine << 10)  # it counts in KiB
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return min(rooms) // max(num_ranks, 1) if rooms else None


def _free_of_control_groups(root: Path) -> list[int]:
    """Return the room below each limit on the way to the root; version 2, else version 1."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys" / "fs" / "cgroup" / controllers
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(base):
                rooms += _room(folder, *names)
    return rooms


def _room(folder: Path, limit: str, used: str, cached: str) -> list[int]:
    try:
        text = (folder / limit).read_text().strip()
        in_use = int((folder / used).read_text())
    except (OSError, ValueError):
        return []
    if not text.isdigit():  # "max"
        return []
    # Pages of files that nobody has used lately go when there is need.
    return [max(int(text) - in_use + _fields(folder / "memory.stat").get(cached, 0), 0)]


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


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
