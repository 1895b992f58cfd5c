"""A script that runs as it is written, until what it trains was checked, and counted.

Note [A loop in parts]: what an unchanged script calls to be trained, and what it steps, is given to
``capture_in_place``, in the middle of its loop. That refuses nothing, so the loop goes on, and its
report says what of it is captured and why the rest is not. Then the script ends.
"""

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphfsdp import api, in_place
from graphfsdp._capture.rules.refusals import running_optimizer
from graphfsdp._capture.step import CapturedStep
from graphfsdp._capture.trace.source import ModuleTracker, OpPhase, SiteTable, user_source_line
from graphfsdp.base.op_tensors import OpCall, OperatorMode, as_written, is_empty
from graphfsdp.base.torch_internals import is_in_backward, num_dispatch_modes
from graphfsdp.config import Compile, Scope
from graphfsdp.errors import ConfigError, HazardKind, SourceLine
from graphfsdp.in_place.module_part import ModulePart, PartState
from graphfsdp.in_place.parts import Parts
from graphfsdp.optim.adapters.backends import adapt
from graphfsdp.preconditions import Program
from graphfsdp.preflight.check import Findings, check_program
from graphfsdp.preflight.report import CheckReport, PlaceCost

# Steps of the optimizer that steps first: a critic steps less often than that by itself.
_LEAST_STEPS, _MOST_STEPS = 8, 16
_MOST_SECONDS = 60.0
# Iterations whose operators are counted: a fifth one, in which a generator steps, is among them.
_NUM_COUNTED = 5
_ADDED_UP = "backward(), adding up gradients"


class CheckedExit(SystemExit):
    """Ends a script after its check; no error, and no Exception that it could catch by accident."""


class ScriptRun:
    """One run of a script: the step that it captures is checked, or its loop runs in parts.

    Attributes:
        report: What was found; None until then.
        is_to_end: Set when it is, or when the script has ended.
    """

    def __init__(self, target: str) -> None:
        self.report: CheckReport | None = None
        self._target = target
        self._has_captured = False
        self._here = _here()
        self._depth = 0  # of the call of a module that runs
        self._called: dict[int, nn.Module] = {}  # to be trained, by the loop itself
        self._steps: dict[torch.optim.Optimizer, int] = {}
        self._parts: Parts | None = None
        self._in_parts: list[int] = []  # by id
        self._is_theirs = False  # the script calls capture_in_place itself
        self._steps_before = 0
        self._began = 0.0
        self._count: OperatorCount | None = None
        self._costs: tuple[PlaceCost, ...] = ()
        self._stack = ExitStack()
        self._steps_at_call = 0
        self.is_to_end = threading.Event()

    def found(self, how: str) -> CheckReport:
        """Return the report of a script that has ended; ``how``: in which way."""
        if self.report is not None:
            return self.report
        if self._has_captured:
            came_to = "captured a step, but did not call it"
        elif self._steps:
            came_to = "did not call graphfsdp.capture, and stepped its optimizer once"
        else:
            came_to = "did not call graphfsdp.capture, and trained no model with an optimizer"
        raise ConfigError(
            f"the program {how} and {came_to}. Remedy: let it run two iterations, or call "
            "graphfsdp.check in a script of your own"
        )

    @contextmanager
    def following(self) -> Iterator[None]:
        """Run it in the body; CheckedExit once there is a report."""
        call, compile_ = nn.Module.__call__, torch.compile

        @wraps(compile_)
        def compile_nothing(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_(*args, **kwargs)
            self._stack.enter_context(as_written())  # which may take minutes, and writes files
            return compiled

        @wraps(call)
        def note_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _here() != self._here:
                return call(module, *args, **kwargs)
            if not self._depth:
                self._on_call(module)
            self._depth += 1
            try:
                with self._count.calling(module, args, kwargs) if self._count else nullcontext():
                    return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        self._hook = register_optimizer_step_post_hook(self._on_stepped)
        try:
            with (
                self._stack,
                warnings.catch_warnings(),
                mock.patch.object(torch, "compile", compile_nothing),
                mock.patch.object(nn.Module, "__call__", note_and_call),
                mock.patch.object(api, "captured_step", partial(self._capture, api.captured_step)),
                mock.patch.object(in_place, "Parts", self._capture_in_place),
            ):
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are")
                yield
        finally:
            self._look_back()
            self._leave()

    def _on_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _here() == self._here:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def _on_call(self, module: nn.Module) -> None:
        """Note that the loop calls a module; begin, or end, before that."""
        if self._has_captured or is_in_backward() or not _trains(module):
            return
        if self.report is not None:  # it has caught what was to end it
            self._end()
        module = getattr(module, "_orig_mod", module)  # of what torch.compile has wrapped
        self._called[id(module)] = module
        models = self._trained()
        if not models:
            return
        is_new = self._num_steps != self._steps_at_call
        self._steps_at_call = self._num_steps
        together = [*map(id, (*models, *self._steps))]
        is_joined = together != self._in_parts and self._count is None
        if is_joined and not self._is_theirs:
            self._close_parts()
            self._in_parts = together
            self._begin(Parts(models, [*self._steps], keeps_all=True))
        elif self._is_enough() and self._is_counted(is_new=is_new):
            self._look_back()
            self._end()

    def _trained(self) -> list[nn.Module]:
        """Return what the loop has called that holds parameters of what has stepped."""
        groups = [group for each in self._steps for group in each.param_groups]
        params = {id(param) for group in groups for param in group["params"]}
        called = self._called.values()
        inner = {id(part) for each in called for _, part in [*nn.Module.named_modules(each)][1:]}
        return [
            each
            for each in called
            if id(each) not in inner and not params.isdisjoint(map(id, nn.Module.parameters(each)))
        ]

    def _begin(self, parts: Parts) -> None:
        self._parts = parts
        self._began = time.monotonic()
        self._steps_before = self._num_steps

    @property
    def _num_steps(self) -> int:
        return next(iter(self._steps.values()), 0)

    def _is_enough(self) -> bool:
        """Tell whether more iterations would show nothing else."""
        assert self._parts is not None
        num_steps = self._num_steps - self._steps_before
        if num_steps >= _MOST_STEPS:
            return True
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return False  # all ranks end with the same step
        is_settled = all(
            line.state != PartState.WARMUP.value for line in self._parts.report().parts
        )
        is_late = time.monotonic() - self._began > _MOST_SECONDS
        return is_late or (is_settled and num_steps >= _LEAST_STEPS)

    def _is_counted(self, *, is_new: bool) -> bool:
        """Count operators of whole iterations; tell whether of enough. ``is_new``: one begins."""
        assert self._parts is not None
        if self._count is None and is_new and not num_dispatch_modes():
            self._count = self._stack.enter_context(OperatorCount(self._parts))
        elif self._count is not None and is_new and num_dispatch_modes() == 1:
            self._costs = self._count.end_iteration()
            return self._count.num_iterations == _NUM_COUNTED
        return time.monotonic() - self._began > 2 * _MOST_SECONDS

    def _capture_in_place(self, models: Any, optimizers: Any, **_: Any) -> Parts:
        """Do what the script wants, with what does not pay, too."""
        self._close_parts()
        self._is_theirs = True
        parts = Parts(models, optimizers, keeps_all=True)
        self._begin(parts)
        return parts

    def _capture(self, capture: Callable[..., Any], program: Program, *rest: Any) -> Any:
        if _here() != self._here:
            return capture(program, *rest)
        self._has_captured = True
        self._leave()

        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
            if self.report is None:
                self.report = check_program(program, args, kwargs, target=self._target)
            self._end()

        try:
            return _CheckedStep(program, check)
        except ConfigError:  # whatever the batch
            check((), {})

    def _look_back(self) -> None:
        """Report on the loop so far, if it trains a model by now and nothing else was checked."""
        models = self._trained()
        if self._parts is None or not models or self.report is not None or self._has_captured:
            return
        findings = Findings()
        for optimizer in self._steps:
            with findings.noting(HazardKind.OPTIMIZER):
                adapt(optimizer)
        # The modules in one that no graph holds are tried by themselves, and meet the same line.
        told = {(each.kind, each.source, each.why): each for each in self._parts.hazards()[::-1]}
        for hazard in [*told.values()][::-1]:
            findings.add(hazard)
        device = next(nn.Module.parameters(models[0])).device
        parts = self._parts.report()
        self.report = CheckReport(
            tuple(findings), str(device), self._target, parts=parts, costs=self._costs
        )

    def _end(self) -> NoReturn:
        """End the script, whose report is made."""
        self.is_to_end.set()
        raise CheckedExit(0)

    def _leave(self) -> None:
        self._hook.remove()
        self._close_parts()

    def _close_parts(self) -> None:
        if self._parts is not None:
            self._parts.close()


def _here() -> tuple[int, int]:
    """Return process and thread: a loader's workers are copies of this one."""
    return os.getpid(), threading.get_ident()


def _trains(module: nn.Module) -> bool:
    """Tell whether a call of a module now is one that trains it."""
    return (
        torch.is_grad_enabled()
        and module.training
        and any(param.requires_grad for param in nn.Module.parameters(module))
    )


class _CheckedStep(CapturedStep):
    """What a script gets in place of a captured step: one that captures nothing, but answers.

    Its first call ends the script.
    """

    def __init__(
        self, program: Program, check: Callable[[tuple[Any, ...], dict[str, Any]], NoReturn]
    ) -> None:
        options = replace(program.options, scope=Scope.NONE, compile=Compile.OFF)
        super().__init__(api.make_engine(replace(program, options=options)), options)
        self._check = check

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.close()
        for param in self._engine.trained:
            param.grad = None  # the check has gradients of its own
        self._check(args, kwargs)


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


def _shown(line: SourceLine | None) -> str:
    return _ADDED_UP if line is None else line.shown
