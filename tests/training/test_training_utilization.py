"""The arithmetic that MFU counts."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.metrics import describe_mfu, flops_per_token, peak_tflops

CONFIG = GPTConfig(
    vocab_size=100, seq_length=32, num_layers=3, hidden_size=64, num_attention_heads=4
)


@pytest.mark.parametrize("untied", [False, True])
def test_the_formula_agrees_with_counting_matrix_products(untied: bool) -> None:
    config = dataclasses.replace(
        CONFIG, untie_embeddings_and_output_weights=untied, disable_bias_linear=True, swiglu=untied
    )
    model = GPT(config)
    tokens = torch.randint(100, (2, 32))
    # The math kernel is made of plain products, which the counter knows on every device.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    # The formula also counts the norms' weights, which are in no product.
    assert counted == pytest.approx(flops_per_token(model), rel=0.01)


def test_peak_depends_on_gpu_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops("NVIDIA H200", torch.bfloat16) == 989.0
    assert peak_tflops("NVIDIA H100 PCIe", torch.bfloat16) == 756.0
    assert peak_tflops("Unknown GPU", torch.bfloat16) is None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peak_tflops("NVIDIA H200", torch.float32) == 67.0
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_tflops("NVIDIA H200", torch.float32) == 494.0


def test_the_banner_states_formula_and_peak() -> None:
    line = describe_mfu(GPT(CONFIG), "NVIDIA H200", torch.bfloat16)
    assert "989 TFLOP/s" in line
    assert "6 N + 12 L C T" in line
    assert "not known" in describe_mfu(GPT(CONFIG), "Unknown GPU", torch.bfloat16)
