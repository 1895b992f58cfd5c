"""Compares the Python values of the last warm-up with those that the capture would bake in."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphfsdp._capture.compiled_code import has_compiled, has_compiled_regions
from graphfsdp._capture.constant_log import ConstantEntry, ConstantLog, baked_value, other_path
from graphfsdp._capture.function_rules import is_fixed_one_hot, one_hot
from graphfsdp._capture.host_optimizer import running_optimizer
from graphfsdp._capture.op_tensors import LITERAL_OPS, computes_nothing, is_wrapper_subclass
from graphfsdp._capture.rules import Refusal
from graphfsdp._capture.source import ModuleTracker, user_line_in_backward, user_source_line
from graphfsdp.errors import CaptureError


class ConstantWatch:
    """What Python gave to the operators of the iteration before a capture.

    A number that differs between two iterations (a counter, a clock, an annealed weight) is one
    that a replay would freeze without an error.

    Attributes:
        failure: Why the last capture was refused here; None if it was not.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, with_optimizer: bool) -> None:
        """Prepare.

        Args:
            model: Names the modules.
            device: Where it lies.
            with_optimizer: The optimizer steps in what is watched. Its numbers are live, or
                guarded, so its operators are left out.
        """
        self.failure: CaptureError | None = None
        self._model = model
        self._device = device
        self._with_optimizer = with_optimizer
        self._expected: ConstantLog | None = None
        self._is_settled = False

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
        if self.failure is not None:
            raise self.failure

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


class _ConstantMode(TorchDispatchMode):
    """Notes operators."""

    # So that torch.cond and its like are not refused here, but where their turn comes.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: torch would otherwise give up on them for good."""
        return True

    def __init__(self, *, without_optimizer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = ConstantLog()
        self._without_optimizer = without_optimizer

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if computes_nothing():
            return func(*args, **kwargs)
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented  # it desugars itself; its inner operators come back here
        is_op = isinstance(func, torch._ops.OpOverload) and func.namespace != "profiler"
        if is_op and not self._is_left_out():
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_left_out(self) -> bool:
        if not self._without_optimizer or torch.is_grad_enabled():
            return False
        in_backward = torch._C._current_autograd_node() is not None
        return not in_backward and running_optimizer() is not None

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

    def _note(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        super()._note(op, args, kwargs)
        if self._is_aligned:
            self._compare(next(self._expected, None), self.log.entries[-1])

    def _compare(self, before: ConstantEntry | None, now: ConstantEntry | None) -> None:
        op, was = (entry.op if entry else "nothing" for entry in (now, before))
        if before is None or now is None or before.op != now.op:
            self._is_aligned = False
            refusal: Refusal | None = other_path(was, op)
        else:
            refusal = baked_value(before, now)
        if refusal is None or self._failure is not None:
            return
        in_backward = torch._C._current_autograd_node() is not None
        self._failure = CaptureError(
            refusal.message,
            op=op if now else was,
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


__all__ = ["ConstantWatch"]
