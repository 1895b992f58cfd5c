"""What a profile of some steps has found, in frozen records, and as text."""

from dataclasses import dataclass

NUM_LARGEST = 10
_MAX_NAME = 100  # in text: templates of C++ have names of thousands of characters


@dataclass(frozen=True)
class KernelTotal:
    """Everything of one name: a GPU's kernel, copy or fill, or an operator on a CPU.

    Attributes:
        ms: Milliseconds per step, without what it calls in turn.
        calls: Per step.
        share: Of the step.
    """

    name: str
    ms: float
    calls: float
    share: float


@dataclass(frozen=True)
class Gap:
    """A stretch of a step in which no kernel (GPU) or operator (CPU) ran.

    Attributes:
        ms: How long.
        after: What ran before; empty at the start of the first step.
        before: What ran next; empty at the end of the last step.
        within: The innermost named stretch of the host at its start; empty outside of all.
    """

    ms: float
    after: str
    before: str
    within: str


@dataclass(frozen=True)
class RangeTotal:
    """A named stretch of the host's time: a phase, or a unit's gathering and reducing.

    Attributes:
        ms: Milliseconds per step.
        calls: Per step.
    """

    name: str
    ms: float
    calls: float


@dataclass(frozen=True)
class ProfileRecord:
    """Some steps of one contender under torch's profiler, which slows the host down.

    Attributes:
        what: "kernels" or "operators".
        num_steps: Steps that were profiled.
        step_ms: Milliseconds per step, under the profiler.
        busy_ms: Of those, while at least one kernel or operator ran.
        num_kernels: Kernels or operators per step.
        largest: The largest by time.
        num_gaps: Gaps per step.
        gaps: The longest.
        ranges: All named stretches.
        trace: File name of the Chrome trace.
        num_named: Events of graph replays to which the trace gives phase and module.
        notes: What a reader has to know.
    """

    case: str
    contender: str
    what: str
    num_steps: int
    step_ms: float
    busy_ms: float
    num_kernels: float
    largest: tuple[KernelTotal, ...]
    num_gaps: float
    gaps: tuple[Gap, ...]
    ranges: tuple[RangeTotal, ...]
    trace: str
    num_named: int = 0
    notes: tuple[str, ...] = ()

    @property
    def gap_ms(self) -> float:
        """Milliseconds per step in which nothing ran."""
        return max(self.step_ms - self.busy_ms, 0.0)


def describe_profile(record: ProfileRecord) -> str:
    """Return the record for people."""
    share = record.busy_ms / record.step_ms if record.step_ms else 0.0
    lines = [
        f"{record.contender}, {record.case}: {record.num_steps} steps of {record.step_ms:.3f} ms "
        "under the profiler",
        f"  {record.what} ran {record.busy_ms:.3f} ms of a step ({share:.0%}), gaps "
        f"{record.gap_ms:.3f} ms; {record.num_kernels:.0f} {record.what}, "
        f"{record.num_gaps:.0f} gaps",
        f"  largest {record.what}:",
        "        ms  share  calls  name",
    ]
    lines += [
        f"  {item.ms:8.3f}  {item.share:5.1%}  {item.calls:5.0f}  {_short(item.name)}"
        for item in record.largest
    ]
    lines.append("  longest gaps:")
    lines += [
        f"  {gap.ms:8.3f}  after {_short(gap.after) or 'nothing'}, before "
        f"{_short(gap.before) or 'nothing'}" + (f", in {gap.within}" if gap.within else "")
        for gap in record.gaps
    ]
    lines.append("  phases and units:" if record.ranges else "  no phases: not our own code")
    lines += [f"  {item.ms:8.3f}  {item.calls:5.0f}x  {item.name}" for item in record.ranges]
    lines += [f"  note: {note}" for note in record.notes]
    lines.append(f"  timeline: {record.trace} (chrome://tracing or https://ui.perfetto.dev)")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."
