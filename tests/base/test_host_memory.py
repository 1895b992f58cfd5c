"""Large memory on huge pages: zeroed for weights and states, and under what torch allocates."""

import mmap
import pathlib

import pytest
import torch

from graphfsdp._capture.cpu.memory import Arena
from graphfsdp.base.host_memory import advise_huge_pages, zeros_flat

LARGE = 5 * 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 3, LARGE])
def test_memory_is_zeroed_aligned_and_can_be_written(dtype: torch.dtype, numel: int) -> None:
    found = zeros_flat(numel, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype) == ((numel,), dtype)
    assert not found.view(torch.uint8).any()
    if numel:
        assert found.data_ptr() % 16 == 0
        found[-1] = 1
        assert found.float().sum() == 1


@pytest.mark.parametrize("lacks", ["the advice", "huge pages"])
def test_without_huge_pages_memory_is_torch_s(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "the advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    assert not zeros_flat(LARGE, torch.float32, torch.device("cpu")).any()
    advise_huge_pages(torch.empty(LARGE).untyped_storage())


def is_advised(address: int) -> bool:
    """Tell from what Linux says of this process whether huge pages were asked for there."""
    mapped = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            mapped = start <= address < end
        elif mapped and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no huge pages to share out",
)
def test_large_memory_is_advised_also_when_a_programs_pool_has_grown() -> None:
    zeros = zeros_flat(LARGE, torch.float32, torch.device("cpu"))
    assert is_advised(zeros.data_ptr() + (8 << 20))
    arena = Arena()
    for num_bytes in (48 << 20, 160 << 20):
        pool = arena.reserve(num_bytes)
        assert is_advised(pool.data_ptr() + num_bytes // 2)
    small = torch.zeros(16)
    advise_huge_pages(small.untyped_storage())
    assert small.sum() == 0
