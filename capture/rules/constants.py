"""Compares the Python values of the last warm-up with those that the capture would bake in."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp._capture.rules.functions import is_fixed_one_hot, one_hot
from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.compiled_code import has_compiled, has_compiled_regions
from graphfsdp._capture.trace.constant_log import (
    ConstantEntry,
    ConstantLog,
    Steps,
    baked_value,
    fewer_steps,
    other_memory,
    other_path,
)
from graphfsdp._capture.trace.op_tensors import LITERAL_OPS
from graphfsdp._capture.trace.source import ModuleTracker, user_line_in_backward, user_source_line
from graphfsdp._capture.trace.watch_modes import OperatorMode
from graphfsdp._capture.undo.host_optimizer import running_optimizer
from graphfsdp.errors import CaptureError

_LOG = logging.getLogger("graphfsdp")


class ConstantWatch:
    """What Python gave to the operators of the iteration before a capture.

    A number that differs between two iterations (a counter, a clock, an annealed weight) is one
    that a replay would freeze without an error.

    Attributes:
        failure: Why the last capture was refused here; None if it was not.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Prepare.

        Args:
            model: Names the modules.
            device: Where it lies.
            optimizers: Those that step in what is watched. Their numbers are live, or guarded, so
                their operators are left out; whether they step is not.
        """
        self.failure: CaptureError | None = None
        self._model = model
        self._device = device
        self._optimizers = optimizers
        self._with_optimizer = bool(optimizers)
        self._expected: ConstantLog | None = None
        self._is_settled = False
        self._most_steps: Steps = {}
        self._elsewhere: CaptureError | None = None

    def follow(self, other: "ConstantWatch") -> None:
        """Go on from what another one has seen of the same iteration before."""
        self._most_steps = other._most_steps

    @contextmanager
    def noting(self, *, is_first: bool) -> Iterator[None]:
        """Note what the iteration in the body does.

        Args:
            is_first: Nothing like it has run before: it may make what is made once.
        """
        if self._may_run_compiled_code(is_first=is_first):
            yield
            return
        mode = _ConstantMode(without_optimizer=self._with_optimizer)
        with _SameFunctions(), mode:
            yield
        self._expected, self._is_settled = mode.log, not is_first
        self._count_steps(mode.log)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare the iteration in the body, a capture, with the one that was noted.

        If the capture fails, a next one is compared as well: with this one where it has come to
        its end, so that what was mended is not refused for ever, and else with the one before.

        Raises:
            CaptureError: when the iteration is over: it was given another value, or took another
                path.
        """
        self.failure = None
        expected, follows_path = self._expected, self._is_settled
        if expected is None:
            yield
            return
        tracker = ModuleTracker(self._model)
        mode = _ComparingMode(
            expected,
            tracker,
            follows_path=follows_path,
            without_optimizer=self._with_optimizer,
        )
        self._is_settled = False  # if it fails, somebody may mend it, and that is another path
        with tracker.tracking(), mode:
            yield
        self._expected, self._is_settled = mode.log, True
        self.failure = mode.finish()
        fewer = fewer_steps(self._most_steps, mode.log.num_steps)
        if self.failure is None and fewer is not None:
            self.failure = CaptureError(fewer.message, kind=fewer.kind)
        self._count_steps(mode.log)
        if self.failure is not None:
            raise self.failure
        self._elsewhere = mode.elsewhere
        self._name_idle(mode.log)

    def check_memory(self) -> None:
        """Refuse what read other memory; for when nobody knows better which tensor that is.

        Raises:
            CaptureError: Python keeps a tensor from one iteration for the next.
        """
        self.failure, self._elsewhere = self._elsewhere, None
        if self.failure is not None:
            raise self.failure

    def _name_idle(self, log: ConstantLog) -> None:
        """Say which optimizers replays will never step: one that steps each fifth call, say."""
        for index, optimizer in enumerate(self._optimizers):
            if id(optimizer) not in log.num_steps:
                _LOG.warning(
                    "optimizer %d (%s) takes no step in the captured iteration, so no replay will "
                    "step it. Should it step in some calls, capture another iteration for those",
                    index,
                    type(optimizer).__name__,
                )

    def _count_steps(self, log: ConstantLog) -> None:
        for key, (name, count) in log.num_steps.items():
            most = self._most_steps.get(key, (name, 0))[1]
            self._most_steps[key] = name, max(count, most)

    def _may_run_compiled_code(self, *, is_first: bool) -> bool:
        # See Note [Compiled regions]: nothing may watch them. Who has not compiled yet may be
        # about to, once that part of torch is loaded. On a CPU they are refused.
        return self._device.type != "cpu" and (
            has_compiled_regions(self._model)
            or has_compiled()
            or (is_first and "torch._dynamo" in sys.modules)
        )


class _SameFunctions(TorchFunctionMode):
    """Calls what a recording calls instead of a function that looks at values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_fixed_one_hot(func, args, kwargs):
            return one_hot(*args, **kwargs)
        return func(*args, **kwargs)


class _ConstantMode(OperatorMode):
    """Notes operators."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: torch would otherwise give up on them for good."""
        return True

    def __init__(self, *, without_optimizer: bool) -> None:
        super().__init__()
        self.log = ConstantLog()
        self._without_optimizer = without_optimizer
        self._stepping: torch.optim.Optimizer | None = None

    def on_op(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Note an operator, and run it."""
        if op.namespace != "profiler":
            before, self._stepping = self._stepping, self._optimizer_left_out()
            if self._stepping is None:
                self._note(op, args, kwargs)
                self._compare_last()
            elif self._stepping is not before:
                self.log.add_step(self._stepping)
                self._compare_last()
        results = op(*args, **kwargs)
        self.log.add_results(args, kwargs, results)
        return results

    def _optimizer_left_out(self) -> torch.optim.Optimizer | None:
        if not self._without_optimizer or torch.is_grad_enabled():
            return None
        in_backward = torch._C._current_autograd_node() is not None
        return None if in_backward else running_optimizer()

    def _compare_last(self) -> None:
        """Compare what was noted last, if there is something to compare it with."""

    def _note(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        is_literal = op._schema.name in LITERAL_OPS
        # A look at the contents is none of the iteration's operators.
        with _disable_current_modes() if is_literal else nullcontext():
            self.log.add(op, args, kwargs, 0, is_literal=is_literal)


class _ComparingMode(_ConstantMode):
    """Compares each operator with what was noted, while the user's line can still be told."""

    def __init__(
        self,
        expected: ConstantLog,
        tracker: ModuleTracker,
        *,
        follows_path: bool,
        without_optimizer: bool,
    ) -> None:
        super().__init__(without_optimizer=without_optimizer)
        self._expected = iter(expected.entries)
        self._tracker = tracker
        self._follows_path = follows_path
        self._is_aligned = True
        self._failure: CaptureError | None = None
        self._elsewhere: CaptureError | None = None

    def _compare_last(self) -> None:
        if self._is_aligned:
            self._compare(next(self._expected, None), self.log.entries[-1])

    def _compare(self, before: ConstantEntry | None, now: ConstantEntry | None) -> None:
        op, was = (entry.op if entry else "nothing" for entry in (now, before))
        if before is None or now is None or before.op != now.op:
            self._is_aligned = False
            refusal: Refusal | None = other_path(was, op)
        else:
            refusal = baked_value(before, now)
            elsewhere = None if refusal is not None else other_memory(before, now)
            if elsewhere is not None and self._elsewhere is None:
                self._elsewhere = self._error(elsewhere, op)
        if refusal is not None and self._failure is None:
            self._failure = self._error(refusal, op if now else was)

    def _error(self, refusal: Refusal, op: str) -> CaptureError:
        in_backward = torch._C._current_autograd_node() is not None
        return CaptureError(
            refusal.message,
            op=op,
            module_path=self._tracker.path,
            source=user_line_in_backward() if in_backward else user_source_line(),
            kind=refusal.kind,
        )

    def finish(self) -> CaptureError | None:
        """Return what was found; for the end, so that no collective is left out."""
        left = next(self._expected, None)
        if left is not None and self._is_aligned:
            self._compare(left, None)
        # Operators that only the first run has called shift all that follow: then a value was
        # compared with one of another place.
        return self._failure if self._is_aligned or self._follows_path else None

    @property
    def elsewhere(self) -> CaptureError | None:
        """What read other memory than the run before, if both went the same way."""
        return self._elsewhere if self._is_aligned else None
