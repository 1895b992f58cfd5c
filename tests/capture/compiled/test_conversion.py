"""Recordings as FX graphs, without a compiler: the graphs run as they are, so bits are eager's."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp._capture.compiled.stretch_graph import StretchGraph
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, check_against_eager, quick_garbage_collection
from zoo import ZOO
from zoo_models import WIDTH, Squared

CPU = torch.device("cpu")
Compiled = Callable[[list[Tensor]], list[Tensor]]


def as_it_is(graph: StretchGraph) -> Compiled:
    module = copy.deepcopy(graph.module)
    return lambda inputs: list(module(*inputs))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[StretchGraph], Any]], None]:
    """Put a function in place of Inductor."""

    def use(compile_graph: Callable[[StretchGraph], Any]) -> None:
        monkeypatch.setattr("graphfsdp._capture.cpu.compiling.compile_graph", compile_graph)
        monkeypatch.setattr("graphfsdp._capture.choose_backend.require_compiler", lambda: None)

    use(as_it_is)
    return use


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ZOO)
def test_a_graph_computes_what_was_recorded(name: str) -> None:
    options: dict[str, Any] = {"microbatches": 2, "max_grad_norm": 0.05, "num_steps": 8}
    trace = check_against_eager(ZOO[name], CPU, compile=True, **options)
    assert trace.report is not None
    lines = trace.report.compiled
    assert lines
    assert not [line for line in lines if "Error" in line or "what was recorded" in line]
    assert "in 0 pieces" not in lines[0]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["gpt", "channels_last", "odd_shapes", "float64"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_with_optimizers_of_torch(name: str, optimizer: str) -> None:
    check_against_eager(ZOO[name], CPU, optimizer=optimizer, compile=True, num_steps=8)


def step_of(**options: Any) -> tuple[graphfsdp.CapturedStep, nn.Module]:
    quick_garbage_collection()
    torch.manual_seed(0)
    model = Squared(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    return graphfsdp.capture(model, optimizer, compile=True, **options), model
