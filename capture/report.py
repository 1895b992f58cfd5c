"""What a captured step consists of, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CaptureReport:
    """Facts of one captured step; ``str(report)`` is for people.

    Attributes:
        backend: "cpu" or "cuda".
        scope: How much of the iteration is in the graph.
        phase: What the next call does.
        num_calls: Calls so far, by what they did: warm-up, capture, replay, eager.
        num_captures: Successful captures.
        num_nodes: Nodes of the graph; None before the capture, or where the driver is silent.
        num_ops: Operator calls of the recorded iteration.
        op_counts: Recorded calls by operator name, most frequent first.
        capture_ms: Milliseconds that the capture took; None before it.
        static_input_bytes: Bytes of the static inputs.
        gradient_bytes: Bytes of the persistent gradient buffers.
        pool_bytes: Bytes of the graph's private memory pool.
        num_escapes: Tensors that the model kept from the recorded iteration; replays update them.
        inputs: Every leaf of the batch and its metadata.
        without_gradient: Trainable parameters that no gradient reached; the optimizer skips them.
    """

    backend: str
    scope: str
    phase: str
    num_calls: Mapping[str, int]
    num_captures: int
    num_nodes: int | None = None
    num_ops: int | None = None
    op_counts: Mapping[str, int] = field(default_factory=dict)
    capture_ms: float | None = None
    static_input_bytes: int = 0
    gradient_bytes: int = 0
    pool_bytes: int = 0
    num_escapes: int = 0
    inputs: Mapping[str, str] = field(default_factory=dict)
    without_gradient: tuple[str, ...] = ()

    def __str__(self) -> str:
        calls = ", ".join(f"{count} {name}" for name, count in self.num_calls.items() if count)
        lines = [
            f"captured step: backend {self.backend}, scope {self.scope}, phase {self.phase}",
            f"  calls:             {calls or 'none yet'}",
        ]
        if self.num_captures:
            nodes = "unknown" if self.num_nodes is None else str(self.num_nodes)
            lines.append(
                f"  graph:             {nodes} nodes from {self.num_ops} operator calls, "
                f"captured in {self.capture_ms:.0f} ms"
            )
            if self.op_counts:
                top = sorted(self.op_counts.items(), key=lambda pair: -pair[1])[:5]
                names = ", ".join(f"{count} {name}" for name, count in top)
                lines.append(f"  most frequent:     {names}")
            lines.append(f"  kept by the model: {self.num_escapes} tensors, updated by replays")
        lines.append(f"  static inputs:     {self.static_input_bytes:,} bytes")
        lines.append(f"  gradient buffers:  {self.gradient_bytes:,} bytes")
        if self.pool_bytes or self.backend == "cuda":
            lines.append(f"  private pool:      {self.pool_bytes:,} bytes")
        if self.without_gradient:
            lines.append(f"  without gradient:  {', '.join(self.without_gradient)}")
        return "\n".join(lines)


__all__ = ["CaptureReport"]
