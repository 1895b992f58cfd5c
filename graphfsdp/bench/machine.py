"""What a benchmark runs on: hardware and versions."""

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from graphfsdp.bench.results import Row


def find_environment(
    device: torch.device, *, num_ranks: int = 1, backend: str | None = None
) -> Row:
    """Return what numbers are measured on; None is unknown or not there.

    ``date`` is UTC; threads are torch's on the CPU, in each process; ``load_average`` counts
    programs that ran before the start; ``driver`` of a GPU also says how fast it may be.
    """
    gpu = driver = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        query = "--query-gpu=driver_version,clocks.max.sm,power.limit"
        number = f"--id={device.index or 0}"
        driver = _output_of("nvidia-smi", query, "--format=csv,noheader", number)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count() or 1,
        "num_threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "backend": backend,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def _commit() -> str | None:
    """Return the commit of the checkout that this package is in, None where it is in none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*")


def _output_of(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()
