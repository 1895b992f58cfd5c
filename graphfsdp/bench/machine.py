"""What a benchmark runs on, hardware and versions, and how much arithmetic a case is."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch.utils.flop_counter import FlopCounterMode

import graphfsdp
from graphfsdp.bench.experts import ExpertGPT
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, make_model
from graphfsdp.data import Batch
from graphfsdp.training.gpt import GPT
from graphfsdp.training.metrics import flops_per_token

PALM_FORMULA = "6 N + 12 L C T per token (PaLM, appendix B)"
COUNTED = "3 x the matrix products and convolutions of a forward pass, counted"
_PACKAGES = ("graphfsdp", "numpy", "triton", "transformer-engine", "apex", "megatron-fsdp")
# What nvidia-smi is asked for, each with its unit.
_QUERY: Mapping[str, str] = MappingProxyType(
    {"driver": "driver_version", "max_clock": "clocks.max.sm", "power_limit": "power.limit"}
)


def find_environment(
    device: torch.device, *, num_ranks: int = 1, backend: str | None = None
) -> Row:
    """Return what numbers are measured on; None is unknown or not there.

    ``date`` is UTC; threads are torch's on the CPU, in each process; ``load_average`` counts
    programs that ran before the start.
    """
    installed = {name: found for name in _PACKAGES if (found := _version_of(name))}
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {"graphfsdp": graphfsdp.__version__, **installed},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count() or 1,
        "num_threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "backend": backend,
        "device": device.type,
        "load_average": load,
        **_gpu_facts(device),
    }


def _gpu_facts(device: torch.device) -> Row:
    names = ("gpu", "gpu_memory_bytes", "compute_capability", "cuda", *_QUERY)
    if device.type != "cuda":
        return dict.fromkeys(names)
    properties = torch.cuda.get_device_properties(device)
    query = f"--query-gpu={','.join(_QUERY.values())}"
    answer = _output_of("nvidia-smi", query, "--format=csv,noheader") or ""
    said = [line.split(", ") for line in answer.splitlines()]
    index = device.index or 0
    values = said[index] if index < len(said) else []
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        **dict.fromkeys(_QUERY),
        **dict(zip(_QUERY, values, strict=False)),
    }


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


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def model_flops(case: Case, batch: Batch) -> tuple[float, str]:
    """Only matrix products and convolutions count, and recomputation does not."""
    with torch.device("meta"):
        model = make_model(case.workload.model)
    if isinstance(model, GPT):
        num_tokens = case.batch_size * case.workload.items_per_sample
        num_idle = model.num_idle_weights if isinstance(model, ExpertGPT) else 0
        return float((flops_per_token(model) - 6 * num_idle) * num_tokens), PALM_FORMULA
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*(tensor.to("meta") for tensor in batch))
    return 3.0 * counter.get_total_flops(), COUNTED


def num_parameters(case: Case) -> int:
    with torch.device("meta"):
        model = make_model(case.workload.model)
    return sum(param.numel() for param in model.parameters())
