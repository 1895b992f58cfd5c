"""A loop as it is written, whose models and optimizers are captured as far as it pays.

Note [Never slower]: whether a graph of a part is faster than the part as it is written, nobody
knows beforehand. So iterations with it and without it take turns for a while, in an order that a
loop with a rhythm of its own (each fifth iteration trains the generator) does not share, and only
what is faster stays. What was timed before a capture is no measure of what comes behind it (a
curriculum's next length, whose first calls are warm-ups and recordings), so a trial begins anew
with each. What does not pay, or no graph can hold, costs nothing after that: the module's own call
is put back.
"""

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import wraps
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from graphfsdp._capture.cpu.graph import CpuGraphBackend
from graphfsdp._capture.cuda.graph import CudaGraphBackend
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp._capture.trace.source import compiled_modules
from graphfsdp.base.protocols import units_of
from graphfsdp.base.torch_internals import (
    COMPILED_CALL,
    hide_compiled_calls,
    num_dispatch_modes,
    num_function_modes,
)
from graphfsdp.errors import Hazard
from graphfsdp.in_place.module_part import SLOW, ModulePart, PartState
from graphfsdp.optim.adapters.grouped_step import GroupedStep, is_torchs_step

_LOG = logging.getLogger("graphfsdp")
# Whether the part is on. Each quarter has as many of both, and so has, as near as can be, whatever
# comes each second to fifth time: an epoch of three batches with its end, say.
_TURNS = tuple(bool(int(turn)) for turn in "00011101010111001010101000100111")
_MOST_ANEW = 64  # times that a trial begins anew: captures have to end some day
_WALKS = (  # of nn.Module, by which all that is in a model is found
    *("modules", "named_modules", "children", "named_children"),
    *("parameters", "named_parameters", "buffers", "named_buffers"),
)
_COMPILED = "it is compiled"
_PAYS = 0.97  # of the time without it
_TAKEN_BY = "_graphfsdp_taken_by"  # whose a step is that stands in the place of the optimizer's
_NUM_STEPS_UNCALLED = 3  # until the children of a module that is never called are looked at


class _Trial:
    """Iterations with a part and without it, in turns."""

    def __init__(self, part: ModulePart) -> None:
        self.part = part
        self._num_begun = 0
        self._num_captures = -1  # of nobody: the first iteration is not timed
        self._times: dict[bool, list[float]] = {}

    def add(self, seconds: float, num_captures: int) -> None:
        """Take an iteration's time, or begin anew with the next one if it has captured something.

        ``num_captures``: of all parts until here.
        """
        if num_captures != self._num_captures:
            self._num_captures = num_captures
            if self._num_begun < _MOST_ANEW:
                self._num_begun += 1
                self._times = {True: [], False: []}
                self.part.is_on = _TURNS[0]
            return
        self._times[self.part.is_on].append(seconds)
        if not self.is_over:
            self.part.is_on = _TURNS[self._num_timed]

    @property
    def _num_timed(self) -> int:
        return sum(map(len, self._times.values()))

    @property
    def is_over(self) -> bool:
        return self._num_timed == len(_TURNS)

    @property
    def ratio(self) -> float:
        """The time of an iteration with it over one without it."""
        return statistics.median(self._times[True]) / statistics.median(self._times[False])


@dataclass(frozen=True)
class PartLine:
    """What becomes of a module, or of an optimizer's step.

    Attributes:
        name: Where it is in what ``capture_in_place`` was given.
        kind: Its class.
        state: What its calls do.
        why: Why it is not captured; "" where it is.
        num_nodes: Nodes of its forward graphs.
        num_replays: Calls that were replays.
    """

    name: str
    kind: str
    state: str
    why: str = ""
    num_nodes: int = 0
    num_replays: int = 0


@dataclass(frozen=True)
class PartsReport:
    """All parts of a loop; ``str(report)`` is for people."""

    parts: tuple[PartLine, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        width = max((len(part.name) for part in self.parts), default=0)
        lines = []
        for part in self.parts:
            text = f"{part.name:<{width}}  {part.kind}: {part.state}"
            if part.num_replays:
                text += f", {part.num_nodes} nodes, {part.num_replays} replays"
            lines.append(f"{text}. {part.why}".rstrip(". "))
        lines.append("everything else runs as written; graphfsdp.capture has one graph for all")
        return "\n".join(lines)


class Parts:
    """A loop that is captured in parts; what ``graphfsdp.capture_in_place`` returns."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        keeps_all: bool,
    ) -> None:
        """``optimizers`` without wrappers; ``keeps_all``: also what does not pay."""
        self.keeps_all = keeps_all
        self._optimizers = optimizers
        self._parts: dict[int, ModulePart] = {}  # by id of the module
        self._backends: dict[torch.device, GraphBackend] = {}
        self._trial: _Trial | None = None
        self._began = 0.0  # the iteration, where there is a trial
        self._num_steps = 0
        self._undo = ExitStack()
        self._is_closed = False
        self._steps: list[GroupedStep | None] = []
        for place, model in enumerate(models):
            self._add(f"model {place}" if len(models) > 1 else "model", model)
        self._on_cpu = all(device.type == "cpu" for device in self._backends)
        for place in range(len(optimizers)):
            self._take_step(place)

    def _add(self, name: str, module: nn.Module) -> None:
        """Have a module's calls come here, if it can be a part at all."""
        if id(module) in self._parts:
            return
        other = vars(module).get(COMPILED_CALL)
        if isinstance(other, ModulePart):
            other.close_loop()  # of a cell that was run again
            other = vars(module).get(COMPILED_CALL)
        is_compiled = other is not None or type(module).__name__ == "OptimizedModule"
        device = next((param.device for param in nn.Module.parameters(module)), None)
        if device is None or device.type not in ("cpu", "cuda"):
            return
        why = _COMPILED if is_compiled else _why_not(module, device)
        if device not in self._backends:
            # What a forward pass leaves for its backward pass is of no use where it fails.
            self._backends[device] = (
                CpuGraphBackend(device, lands_early=True)
                if device.type == "cpu"
                else CudaGraphBackend(device)
            )
        part = self._parts[id(module)] = ModulePart(
            *(name, module, self._backends[device]),
            keeps_all=self.keeps_all,
            on_end=self._on_end,
            close_loop=self.close,
        )
        if why is not None:
            part.leave(why)
            return
        hide_compiled_calls()
        vars(module)[COMPILED_CALL] = part

    def _on_end(self, part: ModulePart) -> None:
        """Look at what a module is made of that runs as written."""
        if self._trial is not None and self._trial.part is part:
            self._trial = None
        _LOG.info("%s runs as written: %s", part.name, part.why)
        # What is put in place of a module's call, torch.compile would trace as well.
        is_whole = part.why.startswith(SLOW) or part.why == _COMPILED or units_of(part.module)
        if not is_whole:
            self._add_children(part.name, part.module)

    def _add_children(self, name: str, module: nn.Module) -> None:
        for child_name, child in nn.Module.named_children(module):
            path = f"{name}.{child_name}"
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # which are never called
                self._add_children(path, child)
            elif any(True for _ in nn.Module.children(child)):  # a layer alone never pays
                self._add(path, child)

    def _take_step(self, place: int) -> None:
        optimizer = self._optimizers[place]
        other = getattr(optimizer.step, _TAKEN_BY, None)
        modules = self._parts.keys()
        if isinstance(other, Parts) and (other._is_idle or modules & other._parts.keys()):
            other.close()  # of a cell or an epoch that was run before
        before = vars(optimizer).get("step")
        step = optimizer.step
        grouped = GroupedStep(optimizer) if is_torchs_step(step) else None
        self._steps.append(grouped)
        tells = hasattr(step, "_wrapped_by_lr_sched")

        @wraps(step)  # with the mark that schedulers look for
        def call(caller: Any, *args: Any, **kwargs: Any) -> Any:
            if caller is not optimizer:  # a copy, which has this, too
                return type(caller).step(caller, *args, **kwargs)
            # A mode, which looks at operators or changes them, is given those of torch's step.
            is_looked_at = num_dispatch_modes() or num_function_modes()
            is_plain = not (args or kwargs or is_looked_at or self._is_closed)
            if grouped and is_plain and grouped.step():
                if tells:
                    vars(optimizer)["_opt_called"] = True
                result = None
            else:
                result = step(*args, **kwargs)
            if not place:
                self._on_iteration()
            return result

        vars(call)[_TAKEN_BY] = self
        taken = vars(optimizer)["step"] = MethodType(call, optimizer)

        def restore() -> None:
            if vars(optimizer).get("step") is not taken:  # a scheduler's, say, is around it
                return
            del vars(optimizer)["step"]
            if before is not None:
                vars(optimizer)["step"] = before

        self._undo.callback(restore)

    def _on_iteration(self) -> None:
        """Take the time between two steps of the first optimizer."""
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS_UNCALLED:
            for part in [*self._parts.values()]:
                if not part.num_calls and part.state is PartState.WARMUP:
                    self._add_children(part.name, part.module)
        if self._trial is not None:
            seconds = self._now() - self._began
            self._trial.add(seconds, sum(part.num_captures for part in self._parts.values()))
            if self._trial.is_over:
                self._decide(self._trial)
        for part in () if self._trial is not None else self._parts.values():
            if part.state is PartState.TRIAL:
                self._trial = _Trial(part)
                break
        if self._trial is not None:
            self._began = self._now()

    def _now(self) -> float:
        """Return seconds: on a CPU of this process's work, where a GPU works on, of the clock."""
        return time.process_time() if self._on_cpu else time.perf_counter()

    def _decide(self, trial: _Trial) -> None:
        self._trial = None
        part = trial.part
        if trial.ratio <= _PAYS:
            part.is_on, part.state = True, PartState.CAPTURED
            _LOG.info("%s is captured: an iteration takes %.2f of its time", part.name, trial.ratio)
        else:
            part.leave(f"{SLOW} an iteration would take {trial.ratio:.2f} times as long")

    @property
    def _is_idle(self) -> bool:
        return all(part.state is PartState.AS_WRITTEN for part in self._parts.values())

    def report(self) -> PartsReport:
        """Return what is captured, and why the rest is not."""
        lines = [
            PartLine(
                part.name,
                type(part.module).__name__,
                part.state.value,
                part.why,
                part.num_nodes,
                part.num_replays,
            )
            for part in self._parts.values()
        ]
        return PartsReport((*lines, *map(self.step_of, self._optimizers)))

    def step_of(self, optimizer: Any) -> PartLine:
        """Return what becomes of an optimizer's step."""
        place = [*map(id, self._optimizers), id(optimizer)].index(id(optimizer))
        is_grouped = (*self._steps, None)[place] and self._on_cpu
        state = "an operator for each group" if is_grouped else PartState.AS_WRITTEN.value
        return PartLine(f"optimizer {place}", type(optimizer).__name__, state)

    def part_of(self, module: nn.Module) -> ModulePart | None:
        return self._parts.get(id(module))

    def hazards(self) -> list[Hazard]:
        """Return what no graph holds of what the modules compute, with their full names."""
        return [
            replace(found, module_path=f"{part.name}.{found.module_path or ''}".rstrip("."))
            for part in self._parts.values()
            for found in part.hazards
        ]

    def close(self) -> None:
        """Let the loop run as written; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._undo.close()
        self._trial = None
        for part in self._parts.values():
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _why_not(module: nn.Module, device: torch.device) -> str | None:
    """Return why a module can be no part, whatever it does; None if it may."""
    for name in _hidden_walks(module):
        return f"{name} is not torch's"
    if units_of(module):
        return "its weights are sharded, and gathered and reduced by its hooks"
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return f"{type(module).__name__} reduces gradients from C++"
    # Whoever looks on has torch compile them otherwise; on a GPU nobody does.
    for name in compiled_modules(module) if device.type == "cpu" else ():
        return f"{name!r} in it is compiled"
    return None


def _hidden_walks(model: nn.Module) -> Iterator[str]:
    """Find what a user has put in the place of what torch walks through modules by."""
    for module in nn.Module.modules(model):
        for name in _WALKS:
            found = getattr(module, name)
            if getattr(found, "__func__", None) is not getattr(nn.Module, name):
                yield f"{type(module).__name__}.{name}"
