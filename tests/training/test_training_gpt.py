"""The model: shapes, causality, positions, loss."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from graphfsdp.errors import ConfigError
from graphfsdp.training.config import find_preset
from graphfsdp.training.gpt import GPT, GPTConfig, PositionEmbeddingType

SMALL = GPTConfig(vocab_size=50, seq_length=16, num_layers=2, hidden_size=32, num_attention_heads=4)
LLAMA = dataclasses.replace(
    SMALL,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)


def random_tokens(device: torch.device, *, seq_length: int = 16) -> torch.Tensor:
    return torch.randint(50, (3, seq_length), device=device)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_the_loss_is_of_logits_that_see_earlier_tokens_alone(
    config: GPTConfig, device: torch.device
) -> None:
    model = GPT(config).to(device).eval()
    tokens, targets = random_tokens(device), random_tokens(device)
    logits = model(tokens)
    assert logits.shape == (3, 16, 50)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 50
    after = model(changed)
    torch.testing.assert_close(logits[:, :10], after[:, :10])
    assert (logits[:, 10:] - after[:, 10:]).abs().amax(dim=(0, 2)).min() > 1e-6


@pytest.mark.parametrize("kind", ["learned_absolute", "rope"])
def test_the_order_of_earlier_tokens_matters(
    kind: PositionEmbeddingType, device: torch.device
) -> None:
    model = GPT(dataclasses.replace(SMALL, position_embedding_type=kind)).to(device).eval()
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]], device=device)
    first, second = model(tokens)[:, -1]
    assert (first - second).abs().max() > 1e-5


def test_loss_of_bf16_weights_is_float32(device: torch.device) -> None:
    model = GPT(LLAMA).to(device)
    for param in model.parameters():
        param.data = param.data.bfloat16()
    loss = model(random_tokens(device), random_tokens(device))
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(50)) < 0.5  # small weights: nearly uniform


def num_params_of(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(config).parameters())


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("gpt2-124m", 124_475_904),
        ("llama-1b", 1_261_529_088),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_sizes_that_their_names_say(name: str, num_params: int) -> None:
    preset = find_preset(name)
    assert preset.vocab_size is not None
    config = preset.gpt(preset.vocab_size)
    one, two = (num_params_of(dataclasses.replace(config, num_layers=n)) for n in (1, 2))
    assert one + (config.num_layers - 1) * (two - one) == num_params


@pytest.mark.parametrize("groups", [1, 2])
def test_shared_keys_are_keys_that_several_heads_have_in_common(
    groups: int, device: torch.device
) -> None:
    shared = GPT(dataclasses.replace(LLAMA, num_query_groups=groups)).to(device)
    plain = GPT(LLAMA).to(device)
    state = shared.state_dict()
    for name in [name for name in state if name.endswith("attention.qkv.weight")]:
        query, *others = state[name].split([32, 8 * groups, 8 * groups])
        repeated = [part.view(groups, 8, 32).repeat_interleave(4 // groups, 0) for part in others]
        state[name] = torch.cat([query, *(part.view(32, 32) for part in repeated)])
    plain.load_state_dict(state)
    tokens = random_tokens(device)
    torch.testing.assert_close(shared(tokens), plain(tokens))


def test_a_longer_sequence_than_the_model_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="17 tokens, the model was made for at most 16"):
        GPT(SMALL).to(device)(random_tokens(device, seq_length=17))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_query_groups": 3}, "num_query_groups 3 does not divide num_attention_heads 4"),
        ({"num_query_groups": 0}, "num_query_groups 0 does not divide"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)
