"""What an iteration launches as it is written, by the places of a loop that launch it."""

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from graphfsdp._capture.rules.refusals import running_optimizer
from graphfsdp._capture.trace.source import ModuleTracker, OpPhase, SiteTable, user_source_line
from graphfsdp.base.op_tensors import OpCall, OperatorMode, is_empty
from graphfsdp.errors import SourceLine
from graphfsdp.in_place.module_part import ModulePart, PartState
from graphfsdp.in_place.parts import Parts

_ADDED_UP = "backward(), adding up gradients"


def _shown(line: SourceLine | None) -> str:
    return _ADDED_UP if line is None else line.shown


class PlaceCost(NamedTuple):
    """A module or a line, its backward pass included, or an optimizer's step."""

    place: str
    num_ops: float  # operators that it launches in an iteration, in the mean
    share: float  # of what all places launch
    time_share: float  # of the processor time of that; Python's is not in it
    is_captured: bool


class OperatorCount(OperatorMode):
    """Counts operators while it is on, when the parts of a loop run as written.

    What only looks at memory anew, or gets some, launches nothing, and neither does the profiler.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.num_iterations = 0
        self._parts = parts
        self._within = ModuleTracker(nn.Module())
        self._sites = SiteTable(nn.Module(), self._within)
        self._captured: dict[str, ModulePart | None] = {}  # by place
        self._launched: list[tuple[str, int]] = []  # place and nanoseconds

    def calling(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Count what a module's call launches for that part, or for the line that calls it."""
        part, outer = self._parts.part_of(module), self._within.path
        if outer in self._captured or (outer is not None and part is None):
            return nullcontext()
        if part is None:
            return self._within.within(_shown(user_source_line()))
        place = f"{part.name} {type(module).__name__}"
        if part.has_graph_for(args, kwargs):
            self._captured[place] = part
        elif part.is_on:
            place += ", calls that run as written"
        return self._within.within(place)

    def on_op(self, call: OpCall) -> Any:
        place = self._place()
        began = time.process_time_ns()
        result = call.run()
        is_nothing = call.schema_name == "aten::_unsafe_view" or call.op.namespace == "profiler"
        if not (is_nothing or call.op.is_view or is_empty(call.op)):
            self._launched.append((place, time.process_time_ns() - began))
        return result

    def _place(self) -> str:
        number = self._sites.here()
        site = self._sites.sites()[number]
        if site.module is not None:
            part = self._captured.get(site.module)
            is_eager = site.phase is OpPhase.BACKWARD and part and part.goes_back_eagerly
            return f"{site.module}, backward" if is_eager else site.module
        optimizer = None if torch.is_grad_enabled() else running_optimizer()
        if optimizer is None:
            return _shown(site.source)
        step = self._parts.step_of(optimizer)
        place = f"{step.name} {step.kind}"
        if step.state != PartState.AS_WRITTEN.value:
            self._captured[place] = None
        return place

    def end_iteration(self) -> tuple[PlaceCost, ...]:
        """Return what places have launched in the mean until here, the most first."""
        self.num_iterations += 1
        times = Counter[str]()
        for place, nanoseconds in self._launched:
            times[place] += nanoseconds
        return tuple(
            PlaceCost(
                place,
                num_ops / self.num_iterations,
                num_ops / len(self._launched),
                times[place] / max(1, times.total()),
                place in self._captured,
            )
            for place, num_ops in Counter(place for place, _ in self._launched).most_common()
        )
