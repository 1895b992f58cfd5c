"""What a benchmark runs on: versions, hardware, what else the machine does."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import graphfsdp
from graphfsdp.bench.facts import Environment

_PACKAGES = ("graphfsdp", "numpy", "triton", "transformer-engine", "apex", "megatron-fsdp")
_QUERY = ("driver_version", "clocks.max.sm", "power.limit")


def find_environment(
    device: torch.device, *, num_threads: int, num_ranks: int = 1, backend: str | None = None
) -> Environment:
    """Return the facts; what cannot be found out is None."""
    installed = {name: found for name in _PACKAGES if (found := _version_of(name))}
    environment = Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        python=platform.python_version(),
        torch=torch.__version__,
        versions={"graphfsdp": graphfsdp.__version__, **installed},
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cpus=os.cpu_count() or 1,
        num_threads=num_threads,
        num_ranks=num_ranks,
        backend=backend,
        device=device.type,
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    )
    return _with_gpu(environment, device) if device.type == "cuda" else environment


def _with_gpu(environment: Environment, device: torch.device) -> Environment:
    properties = torch.cuda.get_device_properties(device)
    answer = _output_of(
        "nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"
    )
    lines = (answer or "").splitlines()
    index = device.index or 0
    values = [value.strip() for value in lines[index].split(",")] if index < len(lines) else []
    driver, clock, power = values if len(values) == len(_QUERY) else (None, None, None)
    return dataclasses.replace(
        environment,
        gpu=properties.name,
        gpu_memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=driver,
        cuda=torch.version.cuda,
        clock_mhz=_number(clock),
        power_limit_w=_number(power),
    )


def describe(environment: Environment) -> str:
    """Return one sentence for below a table."""
    where = environment.gpu or f"{environment.cpu} ({environment.num_cpus} cores)"
    parts = [f"Measured {environment.date[:10]} on {where}"]
    if environment.gpu is None:
        plural = "s" if environment.num_threads > 1 else ""
        parts.append(f"{environment.num_threads} thread{plural}")
    if environment.num_ranks > 1:
        parts.append(f"{environment.num_ranks} ranks ({environment.backend})")
    parts.append(f"torch {environment.torch}")
    if environment.driver is not None:
        parts.append(f"CUDA {environment.cuda}, driver {environment.driver}")
    parts.append(f"Python {environment.python}")
    text = ", ".join(parts)
    if environment.load_average is not None and environment.load_average > 0.5:
        text += f"; other programs ran meanwhile (load average {environment.load_average:.1f})"
    return f"{text}."


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()
