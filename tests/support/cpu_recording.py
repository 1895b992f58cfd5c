"""Recording of any function on the CPU backend."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from graphfsdp._capture.cpu.graph import CpuGraph, CpuGraphBackend
from graphfsdp._capture.cpu.graph import ReplayUndo as ReplayUndo
from graphfsdp._capture.cpu.program import ProgramBuilder
from graphfsdp._capture.trace.values import Node as Node
from graphfsdp._capture.trace.values import StorageInfo as StorageInfo
from graphfsdp._capture.trace.values import Value as Value
from graphfsdp._capture.trace.values import geometry_of as geometry_of

CPU = torch.device("cpu")
_POISON = 0xFF  # as bytes of a floating-point number a NaN, of an integer -1


class _PoisoningBuilder(ProgramBuilder):
    """Fills all of a program's memory with NaN patterns before each replay, and after last uses."""

    _num_poisoned = -1  # nodes; -1: not even the memory as it was before the first

    def _add_node(self, node: Node) -> None:
        if self._num_poisoned < 0:
            self._poison(self.memory.pool)
            self._num_poisoned = 0
        super()._add_node(node)
        lives = [*zip(self.memory._lives.values(), self.memory.plan.offsets, strict=True)]
        index = next(index for index, each in enumerate(self.nodes) if each is node)
        for life, offset in lives:
            if self._num_poisoned <= life.end <= index and life.num_bytes:
                self._poison(self.memory.pool[offset : offset + life.num_bytes])
        self._num_poisoned = index + 1

    def _poison(self, memory: Tensor) -> None:
        self._lines.append(f"{self._constant(memory, 'a')}.fill_({_POISON})")


class PoisoningBackend(CpuGraphBackend):
    """Its programs overwrite their dead memory."""

    def record(self, *args: Any, **kwargs: Any) -> Any:
        with patch("graphfsdp._capture.cpu.graph.ProgramBuilder", _PoisoningBuilder):
            return super().record(*args, **kwargs)


def poisoned() -> AbstractContextManager[object]:
    """Let each program on a CPU overwrite its dead memory, in a test or in the body."""
    return patch("graphfsdp.api.CpuGraphBackend", PoisoningBackend)


def record(
    iterate: Callable[[], list[Tensor]],
    model: nn.Module | None = None,
    *,
    poisons: bool = False,
    scratch: Sequence[Tensor] = (),
) -> tuple[CpuGraph, list[Tensor]]:
    backend = (PoisoningBackend if poisons else CpuGraphBackend)(CPU)
    undo = backend.begin_undo(())
    try:
        with undo.watching():
            graph, results = backend.record(
                iterate,
                model or nn.Identity(),
                lambda was_touched: None,
                collective=False,
                scratch=scratch,
            )
    except BaseException:
        undo.roll_back()
        raise
    assert isinstance(graph, CpuGraph)
    return graph, results
