"""Replays with a clock at each operator, after which everything is as it was before."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.trace.program_facts import NodeFacts, ProgramFacts
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp.base.op_tensors import OperatorMode, written_tensors
from graphfsdp.errors import CaptureError

_NUM_REPLAYS = 5


def measure_replay(replay: Callable[[], list[Tensor]], program: ProgramFacts) -> tuple[float, ...]:
    """Run a few replays, undo each bit for bit, and return the median microseconds of each node.

    A node that replays do not call takes 0.
    """
    runs = [_by_node(program.nodes, _timed(replay)) for _ in range(_NUM_REPLAYS)]
    return tuple(statistics.median(times) for times in zip(*runs, strict=True))


def _timed(replay: Callable[[], list[Tensor]]) -> list[float]:
    clock = _Clock()
    try:
        with clock:
            replay()
    finally:
        clock.undo.roll_back()
    return clock.times_us


class _Clock(OperatorMode):
    """Times each operator, and keeps the old contents of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.undo = CopyOnWrite()
        self.times_us: list[float] = []

    def on_op(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        for tensor in written_tensors(op, args, kwargs):
            self.undo.save(tensor)
        if torch.Tag.nondeterministic_seeded in op.tags:
            self.undo.save_generators(args, kwargs)
        start = time.perf_counter_ns()
        result = op(*args, **kwargs)
        self.times_us.append((time.perf_counter_ns() - start) / 1e3)
        return result


def _by_node(nodes: Sequence[NodeFacts], times_us: Sequence[float]) -> tuple[float, ...]:
    """Give each node the time of its operator.

    A replay calls one operator for each node that is not over before it, in the order of the
    nodes, and then copies what the model keeps. Which operator may be another than was recorded
    (``add.out`` for ``add.Tensor``, ``fill_`` for ``ones_like``).
    """
    called = [node.index for node in nodes if node.called]
    if len(times_us) < len(called):
        raise CaptureError(
            f"a replay called {len(times_us)} operators for {len(called)} nodes, so their times "
            "cannot be told apart. Remedy: report() without measure, and report this as a bug"
        )
    found = [0.0] * len(nodes)
    for index, time_us in zip(called, times_us, strict=False):
        found[index] = time_us
    return tuple(found)
