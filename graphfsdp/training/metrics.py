"""What is known of the run at one logged step."""

import dataclasses
import json
import math
import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.jsonl``.

    Attributes:
        step: Iterations done, this one included.
        loss: Nats per token of this iteration's batch, all ranks together.
        lr: Learning rate this iteration used.
        grad_norm: Global norm of its gradient before clipping.
        tokens: Tokens trained on so far, all ranks together.
        tokens_per_s: Over the iterations since the last logged step, all ranks together.
        step_ms: Milliseconds per iteration, over the same iterations.
        memory_bytes: Most memory used so far: of the GPU's allocator, or of this process
            (of rank 0).
        phase: What the step did: warmup, capture, replay or eager.
        mfu: Share of the GPUs' peak arithmetic that the model needed, None if unknown.
        val_loss: Nats per token of the held-out part, None where it was not measured.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_ms: float
    memory_bytes: int
    phase: str
    mfu: float | None = None
    val_loss: float | None = None

    def to_json(self) -> str:
        """Return one line of JSON; floats are written so that they read back bit for bit."""
        known = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(known)

    def describe(self, train_iters: int) -> str:
        """Return one line for people."""
        parts = [
            f"step {self.step:>{len(str(train_iters))}}/{train_iters}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_s:,.0f} tok/s",
            f"{self.step_ms:.1f} ms" if self.step_ms >= 10 else f"{self.step_ms:.2f} ms",
            f"{self.memory_bytes / 2**20:,.0f} MiB",
        ]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.val_loss is not None:
            parts.append(f"validation {self.val_loss:.4f}")
        if self.phase not in ("replay", "eager"):
            parts.append(self.phase)
        if not math.isfinite(self.loss):
            parts.append("(not finite: try a smaller --lr)")
        return "  ".join(parts)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
