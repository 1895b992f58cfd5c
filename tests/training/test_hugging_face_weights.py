"""Folders of transformers' Llama and GPT-2: their shape, their weights, and what training keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphfsdp.errors import ConfigError
from graphfsdp.training.build import make_model
from graphfsdp.training.config import parse_train_arguments
from graphfsdp.training.gpt import GPT
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
    assert config.vocab_size is not None
    return make_model(config, config.vocab_size, torch.device("cpu"), torch.float32)


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
