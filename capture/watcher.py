"""Watches an iteration run under the rules: every operator, torch function and host call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphfsdp._capture.function_rules import FunctionRules
from graphfsdp._capture.host_watch import host_watch
from graphfsdp._capture.rules import Refusal, higher_order, is_fixed_result, refuse_op
from graphfsdp._capture.sites import SiteTable
from graphfsdp._capture.source import ModuleTracker, user_source_line
from graphfsdp._capture.storages import StorageInfo, StorageTable
from graphfsdp.errors import CaptureError

# Python hands these a tensor whose data it has just filled in, outside any operator.
_LITERAL_OPS = ("aten::lift_fresh", "aten::lift")
# Operators that write arguments without saying so in their schema.
_SILENT_WRITERS = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
)
_RUNNING_STATISTICS = slice(3, 5)  # running_mean and running_var of each of them

Run = Callable[[], Any]


class Watcher:
    """Runs a function under the rules, and tells a listener of each operator.

    Subclasses override ``on_op``; this base only watches, which is what a CUDA capture needs.

    Attributes:
        storages: Every storage that an operator has touched.
        failure: The first refusal, kept because a model may swallow the exception.
        last_op: Name of the last operator that was started, for diagnosis.
        num_ops: Operators seen.
        sites: Where operators come from.
        site: Number of the site of the last operator that was started.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, defers_refusals: bool = False
    ) -> None:
        """Prepare.

        Args:
            model: Names the modules in error messages.
            device: Where it lies.
            defers_refusals: Go on after a refusal and raise at the end, so that the iteration's
                collectives are all issued.
        """
        self._defers_refusals = defers_refusals
        self.storages = StorageTable()
        self.failure: CaptureError | None = None
        self.last_op: str | None = None
        self.num_ops = 0
        self._tracker = ModuleTracker(model)
        self.sites = SiteTable(model, self._tracker)
        self.site = 0
        self._function_rules = FunctionRules(device.type)
        self._inside_op = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs.

        Raises:
            CaptureError: a rule was broken, even where the model swallowed the exception.
        """
        functions = _FunctionMode(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._tracker.tracking())
                stack.enter_context(functions)
                stack.enter_context(_DispatchMode(self))
                stack.enter_context(host_watch(self._on_host_call, functions))
                yield
        except Exception as error:
            # What follows a swallowed refusal, or what somebody made of it, is not the cause.
            if self.failure is not None and error is not self.failure:
                raise self.failure from error
            raise
        if self.failure is not None:
            raise self.failure

    def on_op(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        written: Sequence[Tensor],
        run: Run,
    ) -> Any:
        """Run an operator that the rules have passed, and return its result."""
        return run()

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's contents differ from replay to replay."""
        info = self.storages.find(tensor, "varies")
        return True if info is None else info.varies

    def has_touched(self, tensor: Tensor) -> bool:
        """Tell whether any operator has read or written a tensor's storage."""
        return self.storages.find(tensor, "has_touched") is not None

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Raise the refusal with the module path and the user's line, at once or at the end.

        Raises:
            CaptureError: unless refusals are deferred.
        """
        error = CaptureError(
            refusal.message,
            op=op,
            module_path=self._tracker.path,
            source=user_source_line(),
        )
        self.failure = self.failure or error
        if not self._defers_refusals:
            raise error

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Judge a torch function called from Python, and run it."""
        if not self._inside_op:
            refused = self._function_rules.refuse(function, args, kwargs, self.varies)
            if refused is not None:
                self.refuse(*refused)
            if function is torch.nn.functional.one_hot and self._is_fixed_one_hot(args, kwargs):
                return self._one_hot(*args, **kwargs)
        return self._function_rules.seal(function(*args, **kwargs))

    def _is_fixed_one_hot(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return int(num_classes) > 0

    def _one_hot(self, tensor: Tensor, num_classes: int) -> Tensor:
        # On a CPU (only there) torch reads the classes on the host to check their range. With a
        # given number of classes the read decides nothing, so it is left out.
        result = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
        return result.scatter_(-1, tensor.unsqueeze(-1), 1)

    def _on_host_call(self, name: str, refusal: Refusal) -> None:
        if not self._inside_op:
            self.refuse(name, refusal)

    def dispatch(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Judge one operator call, run it, and keep the book of storages."""
        if op.namespace == "profiler":
            return op(*args, **kwargs)
        self.last_op = str(op)
        self.num_ops += 1
        self.site = self.sites.here()
        inputs = flat_tensors(args) + flat_tensors(kwargs.values())
        external = not self.is_literal(op)
        infos = [self._info(tensor, str(op), external=external) for tensor in inputs]
        refusal = refuse_op(op, args, kwargs, self.varies)
        if refusal is not None:
            self.refuse(str(op), refusal)
        written = written_tensors(op, args, kwargs)
        self._inside_op = True
        try:
            result = self.on_op(op, args, kwargs, written, lambda: op(*args, **kwargs))
        except CaptureError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._inside_op = False
        varies = torch.Tag.nondeterministic_seeded in op.tags or any(i.varies for i in infos)
        for index, tensor in enumerate((*flat_tensors([result]), *written)):
            known = self.storages.find(tensor, str(op))
            news = varies and not is_fixed_result(op, args, index, self.varies)
            if known is None:
                known = self.storages.add(tensor, str(op), external=False, varies=news)
            known.varies = known.varies or news
        return result

    def _info(self, tensor: Tensor, op: str, *, external: bool) -> StorageInfo:
        info = self.storages.find(tensor, op)
        if info is None:
            info = self.storages.add(tensor, op, external=external, varies=external)
            if external:
                info.first_use = user_source_line()
        return info

    @staticmethod
    def is_literal(op: torch._ops.OpOverload) -> bool:
        """Tell whether an operator hands over data that Python has filled in (torch.tensor)."""
        return op._schema.name in _LITERAL_OPS


class _DispatchMode(TorchDispatchMode):
    # So that torch.cond and its like arrive here, to be refused by name.
    supports_higher_order_operators = True

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented  # it desugars itself; its inner operators come back here
        if not isinstance(func, torch._ops.OpOverload):
            self._watcher.refuse(str(func), higher_order(str(func)))
            return func(*args, **(kwargs or {}))
        return self._watcher.dispatch(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._watcher.on_function(func, args, kwargs or {})


def is_wrapper_subclass(kind: type) -> bool:
    """Tell whether a tensor type handles operators itself (DTensor, async collectives)."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl


def flat_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, lists opened."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(flat_tensors(value))
    return found


def written_tensors(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the arguments that an operator writes, by its schema or by what is known of it."""
    written: list[Tensor] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(flat_tensors([value]))
    if op._schema.name in _SILENT_WRITERS:
        written.extend(flat_tensors(args[_RUNNING_STATISTICS]))
    return written


def read_tensors(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the arguments whose contents an operator reads, and does not just look at anew."""
    read: list[Tensor] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            read.extend(flat_tensors([value]))
    return read


__all__ = ["Watcher", "flat_tensors", "is_wrapper_subclass", "read_tensors", "written_tensors"]
