"""Finds the loop of a script, and has it watched."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, NoReturn, Self
from unittest import mock

import torch
from torch import Tensor, nn

from graphfsdp import in_place
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.trace.source import user_source_line
from graphfsdp.base.hazards import SourceLine
from graphfsdp.base.op_tensors import as_written
from graphfsdp.in_place.part_report import PartsReport
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.trained import (
    trained_with,
    trains,
)
from graphfsdp.preflight.watched_loop import WatchedLoop

Stop = Callable[[CheckReport], NoReturn]
_Models = Sequence[nn.Module]
_Optimizers = Sequence[torch.optim.Optimizer]


class ScriptLoops:
    """Finds what a script trains, when it calls a model that an optimizer is for."""

    def __init__(self, target: str, stop: Stop) -> None:
        self.came_to = "trained no model with an optimizer"
        self.target = target
        self.is_theirs = False  # the script captures by itself
        self._stop = stop
        self._loop: WatchedLoop | None = None
        self._looks = True
        self._is_as_written = False
        self.thread = threading.get_ident()
        self.moved: dict[int, SourceLine | None] = {}  # where a tensor got other memory, by its id

    @contextmanager
    def following(self) -> Iterator[None]:
        call, compile_ = nn.Module.__call__, torch.compile
        data: Any = torch.Tensor.data
        stack = ExitStack()

        @wraps(compile_)
        def compile_nothing(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_(*args, **kwargs)
            if not self._is_as_written:  # what is watched is never compiled
                self._is_as_written = True
                stack.enter_context(as_written())
            return compiled

        def move(tensor: Tensor, value: Tensor) -> None:
            if self._loop is not None:
                self.moved[id(tensor)] = user_source_line()
            data.__set__(tensor, value)

        @wraps(call)
        def start_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._on_call(module, args, kwargs):
                return call(module, *args, **kwargs)

        def start_theirs(models: _Models, optimizers: _Optimizers, **_: Any) -> "_InTheirPlace":
            self._end()
            self.is_theirs = True
            self._loop = WatchedLoop(self, models, optimizers)
            return _InTheirPlace()

        try:
            with (
                stack,
                warnings.catch_warnings(),
                mock.patch.object(torch, "compile", compile_nothing),
                mock.patch.object(nn.Module, "__call__", start_and_call),
                mock.patch.object(in_place, "Parts", start_theirs),
                mock.patch.object(torch.Tensor, "data", property(data.__get__, move)),
            ):
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are")
                yield
            self.finish()
        except KeyboardInterrupt:
            raise
        except BaseException:  # an error, the script's exit, or that of its time
            if self._looks:
                self.finish()
            raise
        finally:
            self._end()

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> AbstractContextManager[object]:
        """Note a call; return what to run it in."""
        if threading.get_ident() != self.thread or not self._looks:
            return nullcontext()
        if self._loop is None and trains(module):
            models, optimizers = trained_with(module)
            if optimizers:
                self._loop = WatchedLoop(self, models, optimizers)
        return nullcontext() if self._loop is None else self._loop.on_call(module, args, kwargs)

    def leave(self) -> None:
        """Look no longer for loops: the script captures a step."""
        self._looks = False
        self._end()

    def finish(self) -> None:
        """End with what was seen so far, where that is enough."""
        if self._loop is not None and self._loop.has_verdict:
            self._loop.finish()

    def stop(self, report: CheckReport) -> NoReturn:
        self._looks = False
        self._stop(report)

    def _end(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


class _InTheirPlace:
    """What a script gets from ``capture_in_place``."""

    phase = Phase.WARMUP

    def report(self) -> PartsReport:
        return PartsReport(())

    def close(self) -> None:
        """Do nothing; nothing is captured."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
