"""Compilers in place of Inductor, and runs that are compared by the bound."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from graphfsdp._capture.compiled import inductor as inductor
from graphfsdp._capture.compiled import worker as worker
from graphfsdp._capture.compiled.bounds import BOUNDS as BOUNDS
from graphfsdp._capture.compiled.bounds import allowances as allowances
from graphfsdp._capture.compiled.bounds import is_weight
from graphfsdp._capture.compiled.inductor import RefusedError as RefusedError
from graphfsdp._capture.compiled.stretch_graph import StretchGraph as StretchGraph
from graphfsdp._capture.cpu import compiling as compiling
from graphfsdp._capture.verify import first_difference
from helpers import Trace, same_bits

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor needs a C++ compiler, and there is none",
)
# The first compilation on a machine compiles torch's headers, too.
LIMIT_S = 300
Compiled = Callable[[list[Tensor]], list[Tensor]]
Compiler = Callable[[StretchGraph], Compiled]


def as_it_is(graph: StretchGraph) -> Compiled:
    """Return what runs the operators of the graph that Inductor gets, whose bits are eager's.

    As a compiler does, it believes what their schemas say of the memory that results look at.
    """
    read = worker.Graph(graph.text.splitlines())
    if read.refused:
        raise RefusedError(read.refused)
    run = torch.func.functionalize(read.module)
    return lambda inputs: list(run(*inputs))


@contextlib.contextmanager
def compiling_by(compiler: Compiler = as_it_is) -> Iterator[None]:
    """Put a function in place of Inductor in the body."""
    with (
        mock.patch.object(inductor.Compiler, "compile", lambda _, graph: compiler(graph)),
        mock.patch("graphfsdp.api.require_compiler"),
    ):
        yield


def compiling_models_by(backend: Any) -> AbstractContextManager[object]:
    """Put a backend of torch.compile in Inductor's place for ``compile=True`` on CUDA."""
    original = nn.Module.compile

    def compile_by(model: nn.Module, options: object) -> None:
        original(model, backend=backend)

    return mock.patch.object(nn.Module, "compile", compile_by)


def assert_within_a_third_of_the_bound(expected: Trace, got: Trace, bound: float) -> None:
    """Compare the first replay, which begins where eager does, and what may not differ at all."""
    before, after, compiled = (expected.snapshots[3], expected.snapshots[4], got.snapshots[4])
    losses = [{f"result {i}": each for i, each in enumerate(t.outputs[4])} for t in (expected, got)]
    weights = {name: tensor for name, tensor in before.items() if is_weight(name)}
    allowed = allowances(after | losses[0], weights, bound / 3)
    assert first_difference(after | losses[0], compiled | losses[1], allowed) is None
    for one, other in zip(expected.snapshots, got.snapshots, strict=True):
        exact = [name for name in one if "step" in name or "generator" in name]
        assert exact
        assert all(same_bits(one[name], other[name]) for name in exact)
    drift = [
        float((left[0].double() - right[0].double()).abs().max() / left[0].double().abs().max())
        for left, right in zip(expected.outputs, got.outputs, strict=True)
    ]
    assert drift[:4] == [0.0] * 4
    assert max(drift) < 10 * bound  # it may grow with every step
