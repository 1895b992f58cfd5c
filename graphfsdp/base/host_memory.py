"""Memory of the host: how much there is, and large pieces on huge pages."""

import ctypes
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

_PAGE = 2 << 20  # bytes of a huge page, of x86-64 and of Arm with pages of 4 KiB
# Two huge pages: below, there is nothing to gain.
_SMALLEST_BYTES = 2 * _PAGE


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
    rooms = [*_free_of_machine(root), *_free_of_control_groups(root)]
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return min(rooms) // max(num_ranks, 1) if rooms else None


def _free_of_machine(root: Path) -> list[int]:
    found = _fields(root / "proc" / "meminfo").get("MemAvailable:")
    return [] if found is None else [found << 10]  # it counts in KiB


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
