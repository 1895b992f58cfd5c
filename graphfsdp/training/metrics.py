"""What is known of the run at one logged step, and how much of a GPU's arithmetic it uses."""

import dataclasses
import json
import math
import resource
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphfsdp.training.gpt import GPT


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.jsonl``; losses are nats per token."""

    step: int  # iterations done, this one included
    loss: float  # of this iteration's batch, all ranks together
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # trained on so far, all ranks together
    tokens_per_s: float  # since the last logged step, all ranks together
    step_ms: float  # over the same iterations
    memory_bytes: int  # most used so far: of the GPU's allocator, or of rank 0's process
    phase: str  # warmup, capture, replay or eager
    data_wait: float = 0.0  # share of that time in which rank 0 waited for its batches
    mfu: float | None = None  # of the GPUs' peak arithmetic, None if unknown
    val_loss: float | None = None  # of the held-out part, None where it was not measured

    def to_json(self) -> str:
        """Return one line of JSON; floats are written so that they read back bit for bit."""
        known = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(known)

    def describe(self, train_iters: int) -> str:
        parts = [
            f"step {self.step:>{len(str(train_iters))}}/{train_iters}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_s:,.0f} tok/s",
            f"{self.step_ms:.1f} ms" if self.step_ms >= 10 else f"{self.step_ms:.2f} ms",
            f"{self.memory_bytes / 2**20:,.0f} MiB",
        ]
        if self.data_wait >= 0.0005:
            parts.append(f"data {self.data_wait:.1%}")
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


class Gpu(NamedTuple):
    """Dense matrix arithmetic in TFLOP/s, and bytes/s of memory and of links where they are known.

    ``tf32`` is of float32 rounded to TF32; bfloat16 is summed in float32. A link's rate is to other
    GPUs, in one direction.
    """

    name: str  # a part of the device's own
    bf16: float
    tf32: float
    fp32: float
    memory_rate: float = math.nan
    link_rate: float = math.nan

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Return the peak for products of that dtype, as torch computes them now."""
        fp32 = self.fp32 if torch.get_float32_matmul_precision() == "highest" else self.tf32
        return 1e12 * (self.bf16 if dtype == torch.bfloat16 else fp32)


# The first whose name is a part of the device's name counts, so longer names come first.
# Source: NVIDIA's data sheets; halves of the figures given "with sparsity". H100 and H200: SXM,
# NVLink 900 GB/s in both directions together; DGX B200: 64 TB/s of eight, NVLink 1.8 TB/s.
GPUS = (
    Gpu("GB200", 2500.0, 1250.0, 80.0),
    Gpu("B200", 2250.0, 1100.0, 75.0, 8e12, 900e9),
    Gpu("H200", 989.0, 494.0, 67.0, 4.8e12, 450e9),
    Gpu("H100 PCIe", 756.0, 378.0, 51.0),
    Gpu("H100 NVL", 835.0, 417.0, 60.0),
    Gpu("H100", 989.0, 494.0, 67.0, 3.35e12, 450e9),
    Gpu("A100", 312.0, 156.0, 19.5),
    Gpu("L40S", 362.0, 183.0, 91.6),
    Gpu("L4", 121.0, 60.0, 30.3),
    Gpu("RTX 4090", 165.2, 82.6, 82.6),
)


def flops_per_token(model: GPT) -> int:
    """Return the matrix arithmetic that training needs per token: 6 N + 12 L C T.

    N counts the weights that take part in a matrix product: all but position vectors and, where
    the output layer has a matrix of its own, the token embedding. Recomputation never counts.

    Source: Chowdhery et al. 2022, appendix B (PaLM, arXiv:2204.02311).
    """
    config = model.config
    num_weights = sum(param.numel() for param in model.parameters())
    if model.position_embedding is not None:
        num_weights -= model.position_embedding.weight.numel()
    if config.untie_embeddings_and_output_weights:
        num_weights -= model.token_embedding.weight.numel()
    attention = 12 * config.num_layers * config.hidden_size * config.seq_length
    return 6 * num_weights + attention


def find_gpu(device_name: str) -> Gpu | None:
    return next((gpu for gpu in GPUS if gpu.name in device_name), None)
