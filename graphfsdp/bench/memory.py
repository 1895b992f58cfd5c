"""Peak resident memory of one contender on a CPU, in a process that runs nothing else."""

import ctypes
import dataclasses
import gc
import os
import re
from pathlib import Path

from graphfsdp.bench.batches import BatchSource, batch_source
from graphfsdp.bench.contender import ContenderSpec, Setting
from graphfsdp.bench.measure import MeasureOptions
from graphfsdp.bench.own_group import group_for
from graphfsdp.bench.records import MemoryRecord
from graphfsdp.bench.run_contender import NUM_WARMUP_STEPS
from graphfsdp.bench.workloads import Case, find_workload

HOW = "resident memory of a process that runs nothing else"
NUM_STEPS = 6
_CLEAR_REFS = Path("/proc/self/clear_refs")


def can_forget_peak() -> bool:
    """Tell whether this system lets a process forget its peak; Linux does, some sandboxes not."""
    return os.access(_CLEAR_REFS, os.W_OK)


def measure_memory(setting: Setting, spec: ContenderSpec, options: MeasureOptions) -> MemoryRecord:
    """Train a few steps in this process, which must be fresh, and return its peaks."""
    tiny = dataclasses.replace(setting, case=Case(find_workload("gpt-tiny"), setting.case.dtype, 1))
    # Reading the text takes much more memory than a small model.
    (tiny, few), (setting, source) = (_with_batches(each, options) for each in (tiny, setting))
    with group_for([spec], setting):
        # Libraries that are loaded at first use are not what the case needs. Those that compile
        # are: nobody else would have loaded them.
        if not spec.compiles:
            _train(tiny, spec, few, NUM_WARMUP_STEPS)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        baseline = _status_bytes("VmRSS")
        _forget_peak()
        return _train(setting, spec, source, NUM_WARMUP_STEPS + NUM_STEPS, baseline)


def _with_batches(setting: Setting, options: MeasureOptions) -> tuple[Setting, BatchSource]:
    case, source = batch_source(
        setting.case,
        data=options.data,
        random_tokens=options.random_tokens,
        seed=setting.seed,
        device=setting.device,
    )
    return dataclasses.replace(setting, case=case), source


def _train(
    setting: Setting,
    spec: ContenderSpec,
    source: BatchSource,
    num_steps: int,
    baseline: int = 0,
) -> MemoryRecord:
    contender = spec.make(setting)
    init_peak = 0
    for step in range(num_steps):
        if step == NUM_WARMUP_STEPS:
            init_peak = _status_bytes("VmHWM")
            _forget_peak()
        contender(source.take(step, 1)[0], step)
    steps_peak = _status_bytes("VmHWM")
    contender.close()
    return MemoryRecord(
        HOW,
        process_bytes=max(init_peak, steps_peak),
        init_bytes=max(init_peak - baseline, 0),
        steps_bytes=max(steps_peak - baseline, 0),
    )


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def _forget_peak() -> None:
    gc.collect()
    _CLEAR_REFS.write_text("5")  # "5" sets VmHWM to VmRSS
