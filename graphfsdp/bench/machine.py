"""What a benchmark runs on, hardware and versions, and how much arithmetic a case is."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import graphfsdp
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, make_model
from graphfsdp.data import Batch
from graphfsdp.training.gpt import GPT
from graphfsdp.training.metrics import flops_per_token

PALM_FORMULA = "6 N + 12 L C T per token (PaLM, appendix B)"
COUNTED = "3 x the matrix products and convolutions of a forward pass, counted"
_PACKAGES = ("numpy", "triton", "transformer-engine", "apex")


def find_environment(
    device: torch.device, *, num_ranks: int = 1, backend: str | None = None
) -> Row:
    """Return what numbers are measured on; None is unknown or not there.

    ``date`` is UTC; threads are torch's on the CPU, in each process; ``load_average`` counts
    programs that ran before the start.
    """
    known = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {
            "graphfsdp": graphfsdp.__version__,
            **{name: known[name] for name in _PACKAGES if name in known},
        },
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
    if device.type != "cuda":
        return dict.fromkeys(("gpu", "gpu_memory_bytes", "compute_capability", "cuda", "driver"))
    properties = torch.cuda.get_device_properties(device)
    # And how fast it may be.
    query = "--query-gpu=driver_version,clocks.max.sm,power.limit"
    answer = _output_of("nvidia-smi", query, "--format=csv,noheader", f"--id={device.index or 0}")
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": answer,
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


def model_facts(case: Case, batch: Batch) -> Row:
    """How large a case is; only matrix products and convolutions count, recomputation does not."""
    with torch.device("meta"):
        model = make_model(case.workload.model)
    if isinstance(model, GPT):
        num_tokens = case.batch_size * case.workload.items_per_sample
        flops, formula = flops_per_token(model) * num_tokens, PALM_FORMULA
    else:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*(tensor.to("meta") for tensor in batch))
        flops, formula = 3 * counter.get_total_flops(), COUNTED
    return {
        "num_parameters": sum(param.numel() for param in model.parameters()),
        "flops_per_step": float(flops),
        "flops_formula": formula,
    }
