"""Recording of any function on the CPU backend."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from graphfsdp._capture.cpu.graph import CpuGraph, CpuGraphBackend

CPU = torch.device("cpu")


def record(
    iterate: Callable[[], list[Tensor]],
    model: nn.Module | None = None,
    *,
    poisons: bool = False,
    scratch: Sequence[Tensor] = (),
) -> tuple[CpuGraph, list[Tensor]]:
    """Record any function of no arguments."""
    backend = CpuGraphBackend(CPU, poisons=poisons)
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
