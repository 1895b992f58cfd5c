"""A script that runs as it is written, until what it trains was checked."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn

from graphfsdp import in_place
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.step import CapturedStep
from graphfsdp._capture.trace.source import user_source_line
from graphfsdp.api import answering, make_engine
from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.op_tensors import as_written
from graphfsdp.config import Scope
from graphfsdp.in_place.parts import Parts
from graphfsdp.preconditions import Program
from graphfsdp.preflight.check import check_program
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.watched_loop import WatchedLoop, trained_with, trains

_MOST_LOOKS = 16  # at all objects, however long they take


class CheckedExit(SystemExit):
    """Ends a script after its check; no error, and no Exception that it could catch by accident."""


class ScriptRun:
    """One run of a script: the step that it captures is checked, or the loop that it has.

    Attributes:
        report: What was found; None until then.
        is_to_end: Set when it is, or when the script has ended.
    """

    def __init__(self, target: str = "cuda", ignore: Sequence[HazardKind | str] = ()) -> None:
        self.report: CheckReport | None = None
        self._target = target
        self._ignored = {HazardKind(kind) for kind in ignore}
        self._has_captured = False
        self._looks = True  # for a loop
        self._loop: WatchedLoop | None = None
        self._thread = threading.get_ident()
        self.is_to_end = threading.Event()
        self._num_looks = 0  # for what may be trained, that found nothing
        self._next_look = 0.0  # seconds

    @property
    def came_to(self) -> str:
        """How far it has come, in words."""
        if self._has_captured:
            return "captured a step, but did not call it"
        trained = "trained no model with an optimizer" if self._loop is None else self._loop.came_to
        return f"did not call graphfsdp.capture, and {trained}"

    @contextmanager
    def following(self) -> Iterator[None]:
        """Run it in the body; CheckedExit once there is a report."""
        call, compile_ = nn.Module.__call__, torch.compile
        data: Any = torch.Tensor.data
        stack = ExitStack()

        @wraps(compile_)
        def compile_nothing(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_(*args, **kwargs)
            stack.enter_context(as_written())  # what is watched is never compiled
            return compiled

        def move(tensor: Tensor, value: Tensor) -> None:
            if self._loop is not None:
                self._loop.moved[id(tensor)] = user_source_line()
            data.__set__(tensor, value)

        @wraps(call)
        def start_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._on_call(module, args, kwargs):
                return call(module, *args, **kwargs)

        try:
            with (
                stack,
                answering(self._capture),
                warnings.catch_warnings(),
                mock.patch.object(torch, "compile", compile_nothing),
                mock.patch.object(nn.Module, "__call__", start_and_call),
                mock.patch.object(in_place, "Parts", self._capture_in_place),
                mock.patch.object(torch.Tensor, "data", property(data.__get__, move)),
            ):
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are")
                yield
            self._finish()
        except KeyboardInterrupt:
            raise
        except BaseException:  # an error, the script's exit, or that of its time
            self._finish()
            raise
        finally:
            self._leave()

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> AbstractContextManager[object]:
        """Note a call; return what to run it in."""
        if threading.get_ident() != self._thread:
            return nullcontext()
        if self.report is not None and trains(module):  # it has caught what was to end it
            raise CheckedExit(0)
        if not self._looks:
            return nullcontext()
        if self._loop is None and trains(module) and time.monotonic() >= self._next_look:
            began = time.monotonic()
            models, optimizers = trained_with(module)
            self._num_looks += 1
            if optimizers:
                self._watch(models, optimizers, is_theirs=False)
            elif self._num_looks > _MOST_LOOKS:  # at all objects: no more than a fifth of the time
                self._next_look = time.monotonic() + 4 * (time.monotonic() - began)
        return nullcontext() if self._loop is None else self._loop.on_call(module, args, kwargs)

    def _watch(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_theirs: bool,
    ) -> None:
        self._leave()
        self._loop = WatchedLoop(
            models, optimizers, target=self._target, is_theirs=is_theirs, end=self.end
        )

    def _capture_in_place(self, models: Any, optimizers: Any, **_: Any) -> Parts:
        """Watch what is to be captured, and capture nothing yet."""
        self._watch(models, optimizers, is_theirs=True)
        return Parts((), (), keeps_all=True)

    def _capture(self, program: Program) -> Any:
        self._has_captured, self._looks = True, False
        self._leave()
        return _CheckedStep(
            program,
            lambda args, kwargs: self.end(
                check_program(program, args, kwargs, target=self._target)
            ),
        )

    def _finish(self) -> None:
        """End with what was seen so far, where that is enough."""
        if self._loop is not None and self._looks:
            self._loop.finish()

    def end(self, report: CheckReport) -> NoReturn:
        """End the script with a report."""
        self._looks = False
        self.report = self.report or report.without(self._ignored)
        self.is_to_end.set()
        raise CheckedExit(0)

    def _leave(self) -> None:
        if self._loop is not None:
            self._loop.close()


class _CheckedStep(ExitStack):
    """What a script gets in place of a captured step; its first call ends the script.

    What it is asked before, a step answers that captures nothing.
    """

    phase = Phase.WARMUP

    def __init__(
        self, program: Program, check: Callable[[tuple[Any, ...], dict[str, Any]], NoReturn]
    ) -> None:
        super().__init__()
        self._program, self._check = program, check

    @cached_property
    def _eager(self) -> CapturedStep:
        options = replace(self._program.options, scope=Scope.NONE)
        engine = make_engine(replace(self._program, options=options))
        step = CapturedStep(engine, options)
        self.callback(step.close)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._eager, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.close()
        self._check(args, kwargs)
