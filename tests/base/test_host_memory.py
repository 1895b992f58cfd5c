"""How much memory there is, and large pieces of it: zeroed, on huge pages."""

import mmap
import pathlib

import pytest
import torch

from graphfsdp._capture.cpu.memory import Arena
from graphfsdp.base.host_memory import advise_huge_pages, available_bytes, zeros_flat

LARGE = 5 * 2**20


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


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_that_machine_and_control_groups_leave_is_shared_by_ranks(
    version: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_bytes(tmp_path) is None
    assert (available_bytes() or 1) > 0
    limit, used, cached = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    line, base = {
        1: ("4:memory:/jobs/one", tmp_path / "sys" / "fs" / "cgroup" / "memory"),
        2: ("0::/jobs/one", tmp_path / "sys" / "fs" / "cgroup"),
    }[version]
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert available_bytes(tmp_path) == 1000 << 10
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"7:cpu:/other\n{line}\n")
    (base / "jobs" / "one").mkdir(parents=True)
    (base / "jobs" / "one" / limit).write_text("max" if version == 2 else str(1 << 62))
    (base / "jobs" / "one" / used).write_text("5")
    (base / "jobs" / limit).write_text("900000")
    (base / "jobs" / used).write_text("500000")
    (base / "jobs" / "memory.stat").write_text(f"anon 3\n{cached} 100000\n")
    assert available_bytes(tmp_path) == 500_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_bytes(tmp_path) == 125_000
