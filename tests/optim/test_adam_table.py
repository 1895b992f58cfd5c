"""The tables of docs/fused_adam.md, and the counts of bytes and launches behind them."""

import pytest
import torch

from benchmarks import adam_table
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.settings import bytes_per_param


def test_the_document_shows_the_present_tables() -> None:
    text = adam_table.DOCUMENT.read_text(encoding="utf-8")
    assert "<!-- bytes: begin -->" in text
    assert "<!-- launches: begin -->" in text
    assert adam_table.updated(text) == text, "run: python -m benchmarks.adam_table"


def test_models_have_the_published_sizes() -> None:
    found = {
        name: (len(shapes), sum(adam_table.num_elements(shapes)))
        for name, shapes in adam_table.MODELS.items()
    }
    assert found == {"GPT-2-124M": (148, 124_439_808), "Llama-3-8B": (291, 8_030_261_248)}


def test_launch_rules_give_the_known_counts() -> None:
    numels = adam_table.num_elements(adam_table.gpt2_124m())
    torch_rule, te_rule, _ = adam_table.RULES.values()
    assert adam_table.num_launches(numels, torch_rule) == 1
    assert adam_table.num_launches(numels, te_rule) == 7
    assert adam_table.num_launches([sum(numels)], te_rule) == 6
    assert adam_table.num_launches([1] * 36, te_rule) == 1
    assert adam_table.num_launches([1] * 37, te_rule) == 2


@pytest.mark.parametrize("name", adam_table.CASES)
def test_bytes_are_those_of_the_tensors_that_a_step_touches(name: str) -> None:
    case = adam_table.CASES[name]
    param = torch.nn.Parameter(torch.zeros((2, 256), dtype=case.param))
    optimizer = FusedAdam([param], use_decoupled_grad=True, **case.settings)
    param.decoupled_grad = torch.ones_like(param, dtype=case.grad)  # type: ignore[attr-defined]
    optimizer.step()
    state = [value for key, value in optimizer.state[param].items() if key != "step"]
    main = optimizer.state[param].get("master_param")
    written = sum(value.nbytes for value in state) + param.nbytes
    read = written + param.numel() * case.grad.itemsize
    if main is not None and main.dtype == torch.float32:
        read -= param.nbytes
    expected = bytes_per_param(optimizer.settings, case.param, case.grad) * param.numel()
    assert expected == read + written
