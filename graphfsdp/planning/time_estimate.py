"""How long an iteration may take, from stated speeds: an estimate, with its assumptions."""

from collections.abc import Iterable
from dataclasses import dataclass

from graphfsdp.errors import ConfigError
from graphfsdp.planning.model_plan import Collective

_MICRO = 1e-6
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True)
class Speeds:
    """What the machines are taken to do.

    Attributes:
        tflops: Matrix arithmetic of one GPU, as its data sheet has it.
        utilization: Share of it that the model reaches while it computes (MFU).
        bandwidth_gbs: Gigabytes (1e9) that each rank sends per second while all do.
        latency_us: Microseconds of one step of a ring.
    """

    tflops: float = 989.0
    utilization: float = 0.4
    bandwidth_gbs: float = 50.0
    latency_us: float = 5.0

    def __post_init__(self) -> None:
        for name in ("tflops", "bandwidth_gbs"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization must be in (0, 1], got {self.utilization}")
        if not self.latency_us >= 0:
            raise ConfigError(f"latency_us must be at least 0, got {self.latency_us}")


@dataclass(frozen=True)
class TimeEstimate:
    """Milliseconds of one iteration.

    Attributes:
        compute_ms: Matrix arithmetic of one rank.
        communication_ms: All collectives, one after the other.
    """

    compute_ms: float
    communication_ms: float

    @property
    def overlapped_ms(self) -> float:
        """If communication hides behind arithmetic as far as it can: no iteration is faster."""
        return max(self.compute_ms, self.communication_ms)

    @property
    def serial_ms(self) -> float:
        """If nothing overlaps."""
        return self.compute_ms + self.communication_ms


def estimate_time(flops: float, collectives: Iterable[Collective], speeds: Speeds) -> TimeEstimate:
    """Return the time of an iteration.

    Args:
        flops: Floating-point operations of one rank in one iteration.
        collectives: Of one iteration.
        speeds: What the machines do.

    Source: Thakur et al. 2005, section 3 (ring algorithms): an all-gather or reduce-scatter of
        B bytes on R ranks takes (R - 1) latencies and (R - 1) / R of B at the bandwidth of one
        rank, an all-reduce twice that.
    """
    compute_s = flops / (speeds.tflops * _TERA * speeds.utilization)
    communication_s = 0.0
    for call in collectives:
        steps = (call.num_ranks - 1) * (2 if call.op == "all_reduce" else 1) * call.count
        communication_s += steps * speeds.latency_us * _MICRO
        communication_s += call.wire_bytes / (speeds.bandwidth_gbs * _GIGA)
    return TimeEstimate(compute_s * 1e3, communication_s * 1e3)
