"""What a number was measured on."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def today() -> str:
    """Return the date of the measurement, UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """Return what a small program prints, or None where there is no such program."""
    try:
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def cpu_name() -> str:
    """Return the processor's own name."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, object]:
    """Return versions and hardware, for a result file."""
    facts: dict[str, object] = {
        "date": today(),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "device": str(device),
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_multiprocessors": properties.multi_processor_count,
            "driver": driver.splitlines()[0] if driver else None,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def slug(text: str) -> str:
    """Return ``text`` as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def output_directory() -> pathlib.Path:
    """Return the directory that OUT names, else benchmarks/results, and make it."""
    path = pathlib.Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    path.mkdir(parents=True, exist_ok=True)
    return path
