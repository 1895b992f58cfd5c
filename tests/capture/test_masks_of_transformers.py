"""Hugging Face models with the masks of two dimensions that every fine-tuning script passes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import Batch, Case, assert_same_run, run
from parts_helpers import check

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
WORDS = {"vocab_size": 50}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32}
SHAPE = (3, 8)


def make(name: str, head: str, **config: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        chosen = getattr(transformers, f"{name}Config")(**config)
        model: nn.Module = getattr(transformers, f"{name}For{head}")(chosen)
        return model

    return made


def both_ways(mask: Tensor) -> Tensor:
    return mask.bool()[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


def causal(mask: Tensor) -> Tensor:
    return both_ways(mask) & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()


def num_hidden(generator: torch.Generator) -> int:
    """Return how much of a row is hidden; sometimes nothing is."""
    return int(torch.randint(3, (), generator=generator))


def words(
    shown: Callable[[Tensor], Tensor] = lambda mask: mask,
) -> Callable[[torch.Generator], Batch]:
    """Return what makes batches; ``shown`` makes their masks of four dimensions."""

    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(3, 50, SHAPE, generator=generator)
        mask = torch.ones(SHAPE, dtype=torch.long)
        if hidden := num_hidden(generator):
            mask[0, 5:] = mask[1, 8 - hidden :] = 0
        return Batch(kwargs={"input_ids": ids, "labels": ids % 2, "attention_mask": shown(mask)})

    return batch


@pytest.mark.parametrize(
    ("make", "written", "passed"),
    [
        (make("Bert", "TokenClassification", **WORDS, **SMALL), words(both_ways), words()),
        (make("Llama", "CausalLM", **WORDS, **SMALL), words(causal), words()),
    ],
    ids=["bert", "llama"],
)
def test_a_captured_mask_of_two_dimensions_has_the_bits_of_a_plain_loops_of_four(
    make: Callable[[], nn.Module], written: Any, passed: Any
) -> None:
    plain = run(Case(make, written), "plain", CPU, optimizer="adamw")
    captured = run(Case(make, passed), "full_iteration", CPU, optimizer="adamw")
    assert_same_run(plain, captured)
    assert captured.report.num_calls["replay"] == 10


def test_a_loop_that_is_captured_in_place_reads_its_masks_and_is_told_so() -> None:
    """Another mask has other bits, so the model runs as written there."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for _ in range(24):
            loss = model(**words()(torch.default_generator).kwargs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    parts = check(loop, make("Llama", "CausalLM", **WORDS, **SMALL, use_cache=False))
    lines = {line.name: line for line in parts.report().parts}
    assert "reads a value of the iteration on the host" in lines["model"].why
    assert "masking_utils.py" in lines["model"].why
    assert lines["model.model.layers.0"].num_replays >= 10
