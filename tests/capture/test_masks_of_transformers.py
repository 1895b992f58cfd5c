"""Hugging Face models with masks of two dimensions, as every fine-tuning script passes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from helpers import NUM_STEPS, quick_garbage_collection

transformers = pytest.importorskip("transformers")

WORDS = {"vocab_size": 50}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE = (3, 8)


def bert() -> nn.Module:
    config = transformers.BertConfig(**WORDS, **SMALL, intermediate_size=32)
    model: nn.Module = transformers.BertForTokenClassification(config)
    return model


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**WORDS, **SMALL, intermediate_size=32)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**WORDS, **sizes, decoder_start_token_id=0)
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def both_ways(mask: Tensor) -> Tensor:
    return mask.bool()[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


def causal(mask: Tensor) -> Tensor:
    return both_ways(mask) & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()


def losses_of(
    make: Callable[[], nn.Module], scope: str, shown: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Train; ``shown`` makes the mask of four dimensions, None leaves it at two."""
    quick_garbage_collection()
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with graphfsdp.capture(model, optimizer, scope=scope) as step:
        for index in range(NUM_STEPS):
            words = torch.randint(3, 50, SHAPE, generator=generator)
            mask = torch.ones(SHAPE, dtype=torch.long)
            if index % 3:  # sometimes nothing is hidden
                mask[0, 5:] = 0
                mask[1, 8 - index % 4 :] = 0
            batch: dict[str, Any] = {"input_ids": words, "labels": words % 2}
            batch["attention_mask"] = mask if shown is None else shown(mask)
            losses.append(step(**batch))
            optimizer.param_groups[0]["lr"] *= 0.9
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("make", "shown"), [(bert, both_ways), (llama, causal), (t5, None)], ids=["bert", "llama", "t5"]
)
def test_a_mask_of_two_dimensions_is_captured_with_the_bits_of_one_of_four(
    make: Callable[[], nn.Module], shown: Callable[[Tensor], Tensor] | None
) -> None:
    assert torch.equal(losses_of(make, "none", shown), losses_of(make, "full_iteration"))
