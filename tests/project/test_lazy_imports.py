"""Modules that an iteration imports on its way: torch does that, and so do models."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphfsdp
from cpu_recording import record

LIBRARY = """
import random
SEED = random.random()
def scale(x):
    return x * 2
def draw():
    return random.random()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "library_that_draws_when_it_is_imported"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_module_may_draw_numbers_while_it_is_imported(library: str) -> None:
    x = torch.ones(3)

    def iterate() -> list[Tensor]:
        return [__import__(library).scale(x)]

    graph, _ = record(iterate)
    assert torch.equal(graph.replay()[0], 2 * x)


def test_a_function_of_an_imported_module_may_not(library: str) -> None:
    x = torch.ones(3)

    def iterate() -> list[Tensor]:
        return [x * __import__(library).draw()]

    with pytest.raises(graphfsdp.CaptureError, match=r"random\.Random\.random"):
        record(iterate)
