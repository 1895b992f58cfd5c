"""Peak resident memory of one workload under one scope, measured in a process of its own.

``python -m benchmarks.memory WORKLOAD SCOPE`` prints three numbers as JSON: the peak of the whole
process, the peak of a run from the making of the model on, with the recording in it, and the peak
of later steps alone; the last two without what the process needs for the libraries.
"""

import ctypes
import gc
import json
import os
import pathlib
import re
import subprocess
import sys

import torch

from benchmarks.environment import ROOT
from benchmarks.workloads import TINY, Run, Workload, find

NUM_STEPS = 6
_CLEAR_REFS = "/proc/self/clear_refs"


def measure(workload: Workload, scope: str) -> dict[str, int]:
    """Run a child process and return the peaks that it prints."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", workload.name, scope],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"memory of {workload.name} under {scope}:\n{result.stderr}")
    numbers: dict[str, int] = json.loads(result.stdout)
    return numbers


def is_available() -> bool:
    """Tell whether this system lets a process forget its peak; Linux does, some sandboxes not."""
    return os.access(_CLEAR_REFS, os.W_OK)


def _status_bytes(field: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def _forget_peak() -> None:
    gc.collect()
    pathlib.Path(_CLEAR_REFS).write_text("5")  # "5" sets VmHWM to VmRSS


def _child(workload: Workload, scope: str) -> dict[str, int]:
    device = torch.device("cpu")
    torch.set_num_threads(workload.num_threads)
    # Libraries that are loaded at first use are not what the workload needs.
    with Run(TINY, scope, device) as run:
        run.warm_up()
    del run
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    baseline = _status_bytes("VmRSS")
    _forget_peak()
    with Run(workload, scope, device) as run:
        run.warm_up()
        peak = _status_bytes("VmHWM")
        _forget_peak()
        for _ in range(NUM_STEPS):
            run()
        replay_peak = _status_bytes("VmHWM")
    return {
        "process_peak_bytes": max(peak, replay_peak),
        "peak_bytes": peak - baseline,
        "replay_peak_bytes": replay_peak - baseline,
    }


if __name__ == "__main__":
    print(json.dumps(_child(find(sys.argv[1]), sys.argv[2])))
