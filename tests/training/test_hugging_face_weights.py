"""The trainer's GPT: causality, positions, sizes; and folders of transformers' Llama and GPT-2."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from graphfsdp.errors import ConfigError
from graphfsdp.training.config import find_preset, parse_train_arguments
from graphfsdp.training.gpt import GPT, GPTConfig, PositionEmbeddingType, make_model
from graphfsdp.training.hugging_face import load_weights, save_weights, shape_of
from training_helpers import lines_of, train

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
MODELS = {"llama": LLAMA, "llama-tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def model_of(folder: Path) -> GPT:
    config = parse_train_arguments(["--hf-model", str(folder), "--seq-length", "16"])
    return make_model(config.gpt(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_saved_are_loaded(name: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", MODELS[name])
    tokenizer = {"tokenizer.json", "vocab.json", "merges.txt"}  # GPT-2's older one is the last two
    for file in tokenizer:
        (source / file).write_text("{}")
    model, other = model_of(source), model_of(source)
    target = tmp_path / "target"
    save_weights(model.state_dict(), model.config, str(source), target)
    kept = {path.name for path in target.iterdir()}
    assert kept == {"config.json", "model.safetensors", *tokenizer}
    load_weights(other, str(target))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_model_of_transformers_has_the_same_logits_and_takes_what_was_trained(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    source = folder_of(tmp_path / "source", MODELS[name])
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(source)
    ).eval()
    theirs.save_pretrained(source)
    tokens = torch.randint(256, (3, 16))
    model = model_of(source).eval()
    load_weights(model, str(source))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits)

    out = tmp_path / "run"
    flags = ["--hf-model", str(source), "--num-layers", "2", "--hidden-size", "32"]
    flags += ["--num-attention-heads", "4", "--train-iters", "6", "--lr-warmup-iters", "1"]
    assert train(device, *flags, "--out", str(out)) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(out / "hugging_face").eval()
    load_weights(model, str(out / "hugging_face"))
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(expected, trained(tokens).logits)
        assert not torch.allclose(expected, theirs(tokens).logits)
    assert lines_of(out)[0]["loss"] < 6.5  # log 256 is 5.5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "mamba"}, "is of type 'mamba'; expected 'llama' or 'gpt2'"),
        ({"rms_norm_eps": 1e-6}, "has rms_norm_eps 1e-06; the trainer's model has 1e-05"),
        ({"head_dim": 16}, "has head_dim 16; the trainer's model has 8"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "has rope_type 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "has type 'linear'"),
        ({**GPT2, "activation_function": "relu"}, "has activation_function 'relu'"),
        ({"num_attention_heads": 0}, r"config\.json lacks a number of the model's shape"),
        ({"model_type": "gpt2", "tie_word_embeddings": True}, r"KeyError\('n_positions'\)"),
    ],
)
def test_what_the_trainer_s_model_would_compute_otherwise_is_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder_of(tmp_path, {**LLAMA, **changed})
    with pytest.raises(ConfigError, match=said):
        shape_of(str(tmp_path))


def test_other_shapes_missing_files_and_a_model_without_memory_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", LLAMA)
    model = model_of(source)
    with pytest.raises(ConfigError, match=r"lack model\.embed_tokens\.weight"):
        load_weights(model, str(source))
    target = tmp_path / "target"
    save_weights(model.state_dict(), model.config, str(source), target)
    wider = model_of(folder_of(tmp_path / "wider", {**LLAMA, "intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight makes \[48, 32\] of blocks\.0"):
        load_weights(wider, str(target))
    (target / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="its files of safetensors cannot be read"):
        load_weights(model, str(target))
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        shape_of(str(tmp_path))
    with pytest.raises(ConfigError, match="--hf-model reads the whole weights"):
        parse_train_arguments(["--hf-model", str(source), "--init-model-with-meta-device"])


SMALL = GPTConfig(vocab_size=50, seq_length=16, num_layers=2, hidden_size=32, num_attention_heads=4)
LLAMA_SHAPE = dataclasses.replace(
    SMALL,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)


def random_tokens(device: torch.device, *, seq_length: int = 16) -> torch.Tensor:
    return torch.randint(50, (3, seq_length), device=device)


@pytest.mark.parametrize("config", [SMALL, LLAMA_SHAPE], ids=["gpt2", "llama"])
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
    model = GPT(LLAMA_SHAPE).to(device)
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
    config = find_preset(name).gpt()
    one, two = (num_params_of(dataclasses.replace(config, num_layers=n)) for n in (1, 2))
    assert one + (config.num_layers - 1) * (two - one) == num_params


@pytest.mark.parametrize("groups", [1, 2])
def test_shared_keys_are_keys_that_several_heads_have_in_common(
    groups: int, device: torch.device
) -> None:
    shared = GPT(dataclasses.replace(LLAMA_SHAPE, num_query_groups=groups)).to(device)
    plain = GPT(LLAMA_SHAPE).to(device)
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
