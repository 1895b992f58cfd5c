"""Hugging Face models with the masks of two dimensions that every fine-tuning script passes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from helpers import NUM_STEPS

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


Batch = Callable[[int, torch.Generator], dict[str, Tensor]]


def words(shown: Callable[[Tensor], Tensor] | None = None) -> Batch:
    """Return what makes batches; ``shown`` makes their masks of four dimensions."""

    def batch(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(3, 50, SHAPE, generator=generator)
        mask = torch.ones(SHAPE, dtype=torch.long)
        if index % 3:  # sometimes nothing is hidden
            mask[0, 5:] = 0
            mask[1, 8 - index % 4 :] = 0
        mask = mask if shown is None else shown(mask)
        return {"input_ids": ids, "labels": ids % 2, "attention_mask": mask}

    return batch


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SMALL, intermediate_size=32, image_size=16, patch_size=8)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def images(index: int, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(3) % 2}


def whisper() -> nn.Module:
    parts = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    lengths = {"max_source_positions": 8, "max_target_positions": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        **WORDS, **parts, **lengths, **tokens, num_mel_bins=8, d_model=16
    )
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return model


def speech(index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return sounds and words of several lengths; sometimes nothing is padded."""
    labels = torch.randint(3, 50, SHAPE, generator=generator)
    sounds, words = torch.ones(3, 16, dtype=torch.long), torch.ones_like(labels)
    if index % 3:
        sounds[0, 9:] = words[0, 5:] = words[1, 8 - index % 4 :] = 0
        labels[words == 0] = -100
    features = torch.randn(3, 8, 16, generator=generator)
    masks = {"attention_mask": sounds, "decoder_attention_mask": words}
    return {"input_features": features, "labels": labels} | masks


def losses_of(make: Callable[[], nn.Module], batch: Batch, *, captured: bool) -> Tensor:
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    step = graphfsdp.capture(model, optimizer) if captured else None
    losses = []
    for index in range(NUM_STEPS):
        if step is not None:
            losses.append(step(**batch(index, generator)))
        else:
            loss = model(**batch(index, generator)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        optimizer.param_groups[0]["lr"] *= 0.9
    if step is not None:
        assert step.phase is graphfsdp.Phase.REPLAY
        step.close()
    return torch.stack(losses)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, Batch]] = {
    "bert": (bert, words(both_ways), words()),
    "llama": (llama, words(causal), words()),
    "t5": (t5, words(), words()),
    "vit": (vit, images, images),
    "whisper": (whisper, speech, speech),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_mask_of_two_dimensions_has_the_bits_of_a_plain_loops_of_four(name: str) -> None:
    make, written, passed = MODELS[name]
    plain = losses_of(make, written, captured=False)
    assert torch.equal(plain, losses_of(make, passed, captured=True))
