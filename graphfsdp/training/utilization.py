"""How much of a GPU's arithmetic a run uses (MFU), with its formula and peak stated."""

from dataclasses import dataclass

import torch

from graphfsdp.training.gpt import GPT


@dataclass(frozen=True)
class GpuPeak:
    """Dense matrix arithmetic of a GPU in TFLOP/s, as its data sheet gives it.

    Attributes:
        name: A part of ``torch.cuda.get_device_name()``.
        bf16_tflops: bfloat16 inputs, float32 sums, without sparsity.
        tf32_tflops: float32 inputs rounded to TF32.
        fp32_tflops: float32 throughout.
    """

    name: str
    bf16_tflops: float
    tf32_tflops: float
    fp32_tflops: float


# The first whose name is a part of the device's name counts, so longer names come first.
# Source: NVIDIA's data sheets; halves of the figures given "with sparsity".
GPU_PEAKS = (
    GpuPeak("GB200", 2500.0, 1250.0, 80.0),
    GpuPeak("B200", 2250.0, 1100.0, 75.0),
    GpuPeak("H200", 989.0, 494.0, 67.0),
    GpuPeak("H100 PCIe", 756.0, 378.0, 51.0),
    GpuPeak("H100 NVL", 835.0, 417.0, 60.0),
    GpuPeak("H100", 989.0, 494.0, 67.0),
    GpuPeak("A100", 312.0, 156.0, 19.5),
    GpuPeak("L40S", 362.0, 183.0, 91.6),
    GpuPeak("L4", 121.0, 60.0, 30.3),
    GpuPeak("RTX 4090", 165.2, 82.6, 82.6),
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


def peak_tflops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak for products of that dtype, or None for a GPU not in the table."""
    for peak in GPU_PEAKS:
        if peak.name in device_name:
            if dtype == torch.bfloat16:
                return peak.bf16_tflops
            uses_tf32 = torch.get_float32_matmul_precision() != "highest"
            return peak.tf32_tflops if uses_tf32 else peak.fp32_tflops
    return None


def describe_mfu(model: GPT, device_name: str, dtype: torch.dtype) -> str:
    """Return one line that says what a run's MFU means."""
    peak = peak_tflops(device_name, dtype)
    if peak is None:
        return "not shown: the peak of this GPU is not known"
    flops = flops_per_token(model)
    return f"of {peak:,.0f} TFLOP/s dense; {flops / 1e6:,.1f} MFLOP per token (6 N + 12 L C T)"
