"""The collector and imports in the middle of everything: nothing is recorded or lost."""

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from cpu_recording import record
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, snapshot
from hidden_count import Unseen


class Garbage:
    """A cycle whose finaliser runs an operator on a tensor of somebody, and then fails."""

    def __init__(self, counted: Tensor) -> None:
        self.me = self
        self._counted = counted
        weakref.finalize(self, fail)

    def __del__(self) -> None:
        self._counted.add_(1)
        raise ArithmeticError("of a finaliser")


def fail() -> None:
    raise ArithmeticError("of a callback")


class Littering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.others = [torch.zeros(())]
        self.forwards = Unseen(None)

    def forward(self, x: Tensor) -> Tensor:
        next(self.forwards)
        Garbage(self.others[0])
        loss: Tensor = self.layers(x).square().sum()
        return loss


@pytest.fixture
def eager_collector() -> Iterator[list[type[BaseException] | None]]:
    """The collector runs all the time; the list says what finalisers have raised."""
    threshold, hook = gc.get_threshold(), sys.unraisablehook
    raised: list[type[BaseException] | None] = []
    gc.collect()
    gc.set_threshold(3, 1, 1)
    sys.unraisablehook = lambda failure: raised.append(failure.exc_type)
    yield raised
    gc.collect()
    gc.set_threshold(*threshold)
    sys.unraisablehook = hook


def test_finalisers_run_between_operators_and_never_in_a_recording(
    eager_collector: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    states = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = Littering()
        optim = FusedAdam(model.parameters(), lr=0.01)
        with graphfsdp.capture(model, optim, scope=scope, warmup_steps=2) as step:
            for _ in range(8):
                Garbage(model.others[0])
                step(torch.randn(3, 4))
            calls = model.forwards.num_calls
        gc.collect()
        assert gc.isenabled()
        # Once for each that was made; a recorded finaliser would run with each replay.
        assert model.others[0] == 8 + calls
        state = snapshot(model, optim)
        states.append({name: value for name, value in state.items() if "attribute" not in name})
    assert calls < 8
    assert_same_state(states[0], states[1])
    assert len(eager_collector) >= 16


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
