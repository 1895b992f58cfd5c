"""Numbers of a result in words and in table cells; the same in every report."""

from collections.abc import Sequence

from graphfsdp.bench.facts import WorkloadFacts
from graphfsdp.bench.records import REFERENCE, CaseResult, ContenderResult, ParityRecord
from graphfsdp.bench.spread import Spread

# Medians this near to 1 are called equal, whatever the pairs say.
_NEAR = 0.03


def verdict(spread: Spread) -> str:
    """Say in words what a ratio of speeds means; a ratio near 1 is nothing to boast of."""
    if abs(spread.median - 1) <= _NEAR:
        return "about equal"
    if spread.minimum < 1 < spread.maximum and abs(spread.median - 1) <= 2 * _NEAR:
        return "within the noise"
    return "faster" if spread.median > 1 else "slower"


def ratio_text(spread: Spread | None) -> str:
    """Return a ratio with its ends, for a table."""
    if spread is None:
        return ""
    return f"{spread.median:.2f} ({spread.minimum:.2f} to {spread.maximum:.2f})"


def parity_text(parity: ParityRecord) -> str:
    """Say how a contender's losses compare with the reference's."""
    if parity.bit_exact:
        return f"equal bit for bit ({parity.num_steps} steps)"
    if parity.max_difference is None or parity.early_difference is None:
        return "not finite"
    return (
        f"{parity.early_difference:.1e} in the first steps, {parity.max_difference:.1e} in "
        f"{parity.num_steps}"
    )


def short_parity_text(parity: ParityRecord) -> str:
    """Say the same in few words."""
    if parity.bit_exact:
        return "equal bits"
    if parity.max_difference is None:
        return "not finite"
    return f"{parity.max_difference:.0e} apart"


def bytes_text(num_bytes: float | None) -> str:
    """Return bytes in MiB or GiB."""
    if num_bytes is None:
        return ""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 10_000 else f"{mebibytes:.1f} MiB"


def memory_text(own: ContenderResult) -> str:
    """Return the peak memory: of the allocator on a GPU, of the process on a CPU."""
    memory = own.memory
    if memory is None:
        return "not measured"
    if memory.allocated_bytes is not None:
        reserved = bytes_text(memory.reserved_bytes)
        return f"{bytes_text(memory.allocated_bytes)}, reserved {reserved}"
    return bytes_text(memory.process_bytes)


def own_memory_text(own: ContenderResult) -> str:
    """Return the peak memory, on a CPU with what the process had not before the model."""
    memory = own.memory
    if memory is None or memory.init_bytes is None or memory.steps_bytes is None:
        return memory_text(own)
    return f"{memory_text(own)} ({bytes_text(max(memory.init_bytes, memory.steps_bytes))})"


def utilization_text(case: CaseResult, name: str) -> str:
    """Return MFU, or the share of the measured peak where no data sheet states one."""
    mfu = case.mfu(name)
    if mfu is not None:
        return f"{mfu:.1%}"
    measured = case.measured_utilization(name)
    return "" if measured is None else f"{measured:.1%} of measured"


def peak_text(case: CaseResult) -> str:
    """Say what utilization is measured by."""
    measured = f"{case.peak.measured_tflops:.3g} TFLOP/s measured ({case.peak.measured_how})"
    if case.peak.stated_tflops is None:
        return f"no data sheet states a peak for this machine; {measured}"
    return f"MFU is of {case.peak.stated_tflops:.0f} TFLOP/s dense (data sheet); {measured}"


def workload_text(workload: WorkloadFacts) -> str:
    """Return a case's name as tables show it."""
    size = f"{workload.batch_size}"
    if workload.unit == "tokens":
        size += f" x {workload.items_per_sample} tokens"
    else:
        size += " images"
    return f"{workload.name} {workload.dtype}, {size}"


def contender_names(cases: Sequence[CaseResult]) -> list[str]:
    """Return every contender that ran or was to run, the reference first, in order."""
    found: dict[str, None] = {REFERENCE: None}
    for case in cases:
        found |= {item.name: None for item in case.contenders}
    for case in cases:
        found |= {item.name: None for item in case.not_run}
    return list(found)
