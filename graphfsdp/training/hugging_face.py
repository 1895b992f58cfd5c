"""Shape and weights of a Llama or a GPT-2 in a folder as transformers keeps it, both ways."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphfsdp.errors import ConfigError
from graphfsdp.training.gpt import GPT, GPTConfig

# What they call what a module of ours holds; several lie behind each other in it.
_LLAMA = MappingProxyType(
    {
        "token_embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    }
)
_GPT2 = MappingProxyType(
    {
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "final_norm": "ln_f",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    }
)
_KEPT = (
    *("config.json", "generation_config.json", "chat_template*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)


def shape_of(folder: str) -> dict[str, Any]:
    """Return the settings that a model of that folder has, by the names of TrainConfig."""
    try:
        return _shape_of(folder, json.loads((Path(folder) / "config.json").read_text("utf-8")))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        what = f"cannot be read ({error})"
    except (KeyError, TypeError, ZeroDivisionError) as error:
        what = f"lacks a number of the model's shape, or has something else there ({error!r})"
    raise ConfigError(
        f"--hf-model {folder}: config.json {what}; give a folder as save_pretrained writes it"
    )


def _shape_of(folder: str, theirs: Mapping[str, Any]) -> dict[str, Any]:
    kind = theirs["model_type"]
    if kind not in ("llama", "gpt2"):
        raise ConfigError(
            f"--hf-model {folder}: is of type {kind!r}; expected 'llama' or 'gpt2'. Others are "
            "captured as they are, in a loop of your own (examples/hugging_face.py)"
        )
    if kind == "gpt2":
        _expect(folder, theirs, activation_function="gelu_new", layer_norm_epsilon=1e-5)
        _expect(folder, theirs, scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True)
        return {
            "vocab_size": theirs["vocab_size"],
            "seq_length": theirs["n_positions"],
            "num_layers": theirs["n_layer"],
            "hidden_size": theirs["n_embd"],
            "num_attention_heads": theirs["n_head"],
            "ffn_hidden_size": theirs.get("n_inner"),
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "swiglu": False,
            "openai_gelu": True,
            "disable_bias_linear": False,
            "untie_embeddings_and_output_weights": False,
        }
    rope = {"rope_type": "default", **(theirs.get("rope_scaling") or {})}
    rope |= theirs.get("rope_parameters") or {}
    heads = theirs["num_attention_heads"]
    _expect(folder, theirs, hidden_act="silu", rms_norm_eps=1e-5)
    _expect(folder, theirs, attention_bias=False, mlp_bias=False)
    _expect(folder, theirs, head_dim=theirs["hidden_size"] // heads)
    _expect(folder, rope, rope_type="default", type="default")
    return {
        "vocab_size": theirs["vocab_size"],
        "num_layers": theirs["num_hidden_layers"],
        "hidden_size": theirs["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": theirs.get("num_key_value_heads"),
        "ffn_hidden_size": theirs["intermediate_size"],
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", theirs.get("rope_theta", 10_000.0)),
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not theirs.get("tie_word_embeddings", False),
    }


@torch.no_grad()
def load_weights(model: GPT, folder: str) -> None:
    """Copy the weights of a folder into a model of its shape, on any device and in any dtype."""
    files = sorted(Path(folder).glob("*.safetensors"))
    try:
        theirs = {name: t for file in files for name, t in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--hf-model {folder}: its files of safetensors cannot be read ({error})"
        ) from None
    # What a GPT-2 of the hub is without its language-model head lacks the prefix.
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    for name, ours in model.named_parameters():
        names, is_transposed = _names(name, model.config)
        missing = [each for each in names if each not in theirs]
        if missing:
            raise ConfigError(f"--hf-model {folder}: its files of safetensors lack {missing[0]}")
        found = [theirs[each].T if is_transposed else theirs[each] for each in names]
        goes_together = len({each.shape[1:] for each in found}) == 1
        tensor = torch.cat(found) if goes_together else found[0]
        if tensor.shape != ours.shape:
            raise ConfigError(
                f"--hf-model {folder}: {names[0]} makes {list(tensor.shape)} of {name}, which is "
                f"{list(ours.shape)}; leave out the flags that change the model's shape"
            )
        ours.copy_(tensor)


def save_weights(state: Mapping[str, Tensor], config: GPTConfig, source: str, target: Path) -> None:
    """Write a folder that transformers reads: weights, with all else of the folder of before."""
    target.mkdir(exist_ok=True)
    for pattern in _KEPT:
        for path in Path(source).glob(pattern):
            shutil.copy(path, target)
    prefix = "transformer." if config.openai_gelu else ""
    shared = config.num_groups * config.head_size
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "output.weight" and not config.untie_embeddings_and_output_weights:
            continue
        names, is_transposed = _names(name, config)
        sizes = [config.hidden_size, shared, shared] if len(names) == 3 else [len(tensor)]
        for each, part in zip(names, tensor.split(sizes), strict=True):
            found[prefix + each] = (part.T if is_transposed else part).contiguous()
    save_file(found, target / "model.safetensors", {"format": "pt"})


def _names(name: str, config: GPTConfig) -> tuple[list[str], bool]:
    """Return what a parameter of ours is called there, and whether it lies transposed there."""
    is_gpt2 = config.openai_gelu
    place, _, kind = name.rpartition(".")
    before = ""
    if place.startswith("blocks."):
        _, layer, place = place.split(".", 2)
        before = f"h.{layer}." if is_gpt2 else f"model.layers.{layer}."
    names = (_GPT2 if is_gpt2 else _LLAMA)[place].split()
    is_transposed = is_gpt2 and kind == "weight" and place.startswith(("attention.", "ffn."))
    return [f"{before}{each}.{kind}" for each in names], is_transposed


def _expect(folder: str, theirs: Mapping[str, Any], **expected: object) -> None:
    """Refuse what the trainer's model would compute otherwise; what is not said is as expected."""
    for name, value in expected.items():
        got = theirs.get(name)
        if got is not None and got != value:
            raise ConfigError(
                f"--hf-model {folder}: has {name} {got!r}; the trainer's model has {value!r}. "
                "Remedy: capture transformers' own model in a loop (examples/hugging_face.py)"
            )
