"""Modules that an iteration imports on its way: torch does that, and so do models."""

import sys
from pathlib import Path

import pytest
import torch

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


def test_a_module_may_draw_numbers_while_it_is_imported_and_its_functions_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "library_that_draws_when_it_is_imported"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    x = torch.ones(3)
    graph, _ = record(lambda: [__import__(name).scale(x)])
    assert torch.equal(graph.replay()[0], 2 * x)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(graphfsdp.CaptureError, match=r"random\.Random\.random"):
        record(lambda: [x * __import__(name).draw()])
