"""Watches an iteration run under the rules: every operator, torch function and host call."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphfsdp._capture.rules.host_calls import HostWatch, host_watch
from graphfsdp._capture.rules.looks import one_hot
from graphfsdp._capture.rules.refusals import (
    HIGHER_ORDER,
    ISOLATION,
    NO_STORAGE,
    UNJOINED,
    Refusal,
    for_this_place,
    is_fixed_result,
    refuse_function,
    refuse_op,
    refuse_unseen_read,
    running_optimizer,
)
from graphfsdp._capture.trace.source import (
    ModuleTracker,
    Ran,
    SiteTable,
    called_function,
    user_source_line,
)
from graphfsdp._capture.trace.values import StorageInfo, StorageTable
from graphfsdp.base.op_tensors import OpCall, OperatorMode, operator_modes, storage_key
from graphfsdp.base.torch_internals import backward_node, dispatch_mode_stack, is_in_backward
from graphfsdp.errors import CaptureError, HazardKind, HazardLog, SourceLine

_Clock = dict[int, int]  # by stream: how many of its operators are known to be over

_UNFORKED = Refusal(
    "{} runs on a side stream that has not waited for the iteration's own stream; it would not be "
    "part of the graph",
    "start each use of a side stream with side_stream.wait_stream(torch.cuda.current_stream())",
    HazardKind.STREAM,
)
_NOT_JOINED = Refusal(
    "{} is the last operator on a side stream that the iteration's own stream does not wait for; a "
    "capture cannot end with a fork that was not joined",
    "end each use of a side stream with torch.cuda.current_stream().wait_stream(side_stream)",
    HazardKind.STREAM,
    UNJOINED,
)
_EVENT_FROM_BEFORE = Refusal(
    "the iteration waits for an event that was recorded before it; in a capture the dependency "
    "would cross its border",
    "record and wait for events inside one iteration, and start collectives inside it",
    HazardKind.STREAM,
    ISOLATION,
)


class Watcher:
    """Runs a function under the rules, and tells a listener of each operator.

    Subclasses override ``on_op``; this base only watches, which is what a CUDA capture needs.

    Attributes:
        storages: Every storage that an operator has touched.
        failure: The first refusal, kept because a model may swallow the exception.
        last_op: Name of the last operator that was started, for diagnosis.
        site: Number of the site of the last operator that was started.
        host: What watches calls that no mode sees, while it does.
        num_quiet: How many calls are under way whose inside is not judged.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        defers_refusals: bool = False,
        hazards: HazardLog | None = None,
    ) -> None:
        """``defers_refusals``: raise at the end only, so that the collectives are all issued.

        ``hazards``: where every refusal is noted; then none is raised at all.
        """
        self._defers_refusals = defers_refusals
        self._hazards = hazards
        self._streams: StreamWatch | None = None
        self.storages = StorageTable()
        self.failure: CaptureError | None = None
        self.last_op: str | None = None
        self.num_ops = 0
        self._tracker = ModuleTracker(model)
        self.sites = SiteTable(model, self._tracker)
        self.site = 0
        self._device = device
        self.num_quiet = 0
        self._thread = threading.get_ident()
        self._has_modes_below = False  # of others, whose Python runs below every operator
        self.host: HostWatch | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs; raise a refusal even where the model has swallowed it."""
        functions = _FunctionMode(self)
        self._thread = threading.get_ident()
        self._has_modes_below = not all(
            isinstance(mode, OperatorMode) for mode in dispatch_mode_stack()
        )
        try:
            with ExitStack() as stack:
                stack.enter_context(self._tracker.tracking())
                stack.enter_context(functions)
                stack.enter_context(DispatchMode(self))
                self.host = stack.enter_context(host_watch(self, functions))
                yield
        except Exception as error:
            # What follows a swallowed refusal, or what somebody made of it, is not the cause.
            if self.failure is not None and error is not self.failure:
                raise self.failure from error
            raise
        finally:
            # It holds the function mode, which holds this: a cycle that only the collector frees,
            # and with it a recording's nodes.
            self.host = None
        if self.failure is not None:
            raise self.failure

    def on_op(self, call: OpCall) -> Any:
        return call.run()

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a read of a tensor on the host is one of a value that changes.

        On CUDA also a constant: the read is a wait, which a capture does not permit.
        """
        if tensor.is_cuda:
            return True
        info = self.storages.get(storage_key(tensor))
        return True if info is None else info.varies

    def has_touched(self, tensor: Tensor) -> bool:
        return self.storages.has(tensor)

    @property
    def place(self) -> tuple[str | None, SourceLine | None]:
        """The running module's full name and the user's line, as an error tells them."""
        if backward_node() is None:
            return self._tracker.path, user_source_line()
        source = user_source_line(in_backward=True)
        if source is not None:
            return self._tracker.path, source
        number = self.sites.here()  # the forward operator's
        site = self.sites.sites()[number]
        return site.module, site.source

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Raise or note a refusal, at once or at the end, with the module path and user's line."""
        self.refuse_at(op, refusal, *self.place)

    def refuse_at(
        self, op: str, refusal: Refusal, module_path: str | None, source: SourceLine | None
    ) -> None:
        refusal = for_this_place(refusal)
        error = CaptureError(
            refusal.message,
            op=op,
            module_path=module_path,
            source=source,
            kind=refusal.kind,
            cuda_error=refusal.cuda_error,
        )
        if self._hazards is not None:
            in_backward = backward_node() is not None
            self._hazards.add(error.hazard, is_echo=in_backward)
            return
        self.failure = self.failure or error
        if not self._defers_refusals:
            raise error

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self.num_quiet += 1
        try:
            yield
        finally:
            self.num_quiet -= 1

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        answer = one_hot(function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if self.num_quiet:
            return _sealed(function(*args, **kwargs))
        on_cpu = self._device.type == "cpu"
        refused = refuse_function(function, args, kwargs, self.varies, on_cpu=on_cpu)
        if refused is not None:
            self.refuse(*refused)
            with self.quiet():  # what it is made of is the same finding
                return _sealed(function(*args, **kwargs))
        num_ops = self.num_ops
        result = function(*args, **kwargs)
        if self.num_ops == num_ops:
            refused = refuse_unseen_read(function, args, self.varies)
            if refused is not None:
                self.refuse(*refused)
        return _sealed(result)

    def on_host_call(self, name: str, refusal: Refusal) -> None:
        if not self.num_quiet and not self._runs_as_written(refusal):
            self.refuse(name, refusal)

    def _runs_as_written(self, refusal: Refusal) -> bool:
        """Tell whether it is compiled code of an optimizer, which runs uncompiled on a CPU."""
        is_compiled = refusal.kind is HazardKind.COMPILED and self._device.type == "cpu"
        return is_compiled and running_optimizer() is not None

    def on_opaque_call(self, begins: bool) -> None:
        """Stop judging inside a call that was refused as a whole, and begin again after it."""
        self.num_quiet += 1 if begins else -1

    def on_stream_call(self, frame: FrameType) -> None:
        if self._streams is not None:
            refusal = self._streams.on_call(frame)
            if refusal is not None and not self.num_quiet:
                self.refuse("torch.cuda.Event.wait", refusal)

    def follow_streams(self) -> None:
        """Follow streams from now on, the current one being that of the iteration."""
        if self._device.type == "cuda":
            self._streams = StreamWatch(self._device)

    def refuse_loose_streams(self) -> None:
        """Refuse side streams that the iteration did not fork or join."""
        if self._streams is not None:
            for use, refusal in self._streams.findings():
                self.refuse_at(use.op, refusal, use.module_path, use.source)

    def dispatch(self, call: OpCall) -> Any:
        """Note an operator, and run it.

        Below torch's own ones there is no Python of a user; below ours streams wait for each other.
        """
        host = self.host
        if host is None:
            return self._dispatch(call)
        if threading.get_ident() != self._thread:
            host.follow()  # see Note [Autograd's threads]
        if self._has_modes_below or not call.is_trusted or call.is_ours:
            call.around = host.resumed
        return self._dispatch(call)

    def _dispatch(self, call: OpCall) -> Any:
        if call.op.namespace == "profiler":
            return call.run()
        name = self.last_op = call.name
        self.num_ops += 1
        self.site = self.sites.here()
        keys = call.keys
        if 0 in keys:
            self._judge(name, NO_STORAGE.of(call.tensors[keys.index(0)].layout))
            with self.quiet():
                return call.run()
        infos = [self._info(*each, call) for each in zip(call.tensors, keys, strict=True)]
        self._judge(name, self.judge_op(call))
        if self._streams is not None:
            self._streams.on_op(name, *self.place)
        self.num_quiet += 1
        try:
            result = self.on_op(call)
        except CaptureError as error:
            found = error.located(*self.place)
            self.failure = self.failure or found
            raise found from None
        finally:
            self.num_quiet -= 1
        self.note_results(call, infos, result)
        return result

    def judge_op(self, call: OpCall) -> Refusal | None:
        return refuse_op(call, self.varies)

    def _judge(self, op: str, refusal: Refusal | None) -> None:
        if refusal is not None and not self.num_quiet:
            self.refuse(op, refusal)

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        varies = call.is_random or any(info.varies for info in infos)
        for index, (tensor, key) in enumerate(call.results(result)):
            if not key:
                self._judge(call.name, NO_STORAGE.of(tensor.layout))
                continue
            known = self.storages.get(key)
            news = varies and not is_fixed_result(call, index, self.varies)
            if known is None:
                known = self.storages.add(tensor, call.name, external=False, varies=news)
            known.varies = known.varies or news
        for tensor in call.written:
            written = self.storages.get(storage_key(tensor))
            if written is not None:
                written.is_written = True
                written.varies = written.varies or varies

    def _info(self, tensor: Tensor, key: int, call: OpCall) -> StorageInfo:
        info = self.storages.get(key)
        if info is None:
            external = not call.is_literal
            info = self.storages.add(tensor, call.name, external=external, varies=external)
            if external:
                info.first_use = user_source_line()
        return info


def _sealed(result: Any) -> Any:
    """Return what a permitted function returned, with NumPy's window on it closed for writing.

    The array of a constant shares its memory, and no operator would tell of a write.
    """
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return result


class DispatchMode(OperatorMode):
    joins = True

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def on_op(self, call: OpCall) -> Any:
        return self.watcher.dispatch(call)

    def on_higher_order(self, func: Callable[..., Any]) -> None:
        self.watcher.refuse(str(func), HIGHER_ORDER.of(func))


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
        return self._watcher.on_function(called_function(func), args, kwargs or {})


@contextmanager
def noting_code(ran: Ran) -> Iterator[None]:
    """Note what code runs in the body: a recording's hook is told of every call already."""
    watcher = watcher_here()
    host = None if watcher is None else watcher.host
    if host is None:
        with ran.noting():
            yield
        return
    # What runs around the body is none of it: torch calls hooks of profilers as a capture begins.
    around, host.ran = host.ran, ran
    try:
        yield
    finally:
        host.ran = around


def watcher_here() -> Watcher | None:
    """Return what watches the operators that are called here."""
    watching = (mode for mode in operator_modes() if isinstance(mode, DispatchMode))
    return next((mode.watcher for mode in watching), None)


class StreamUse(NamedTuple):
    op: str
    module_path: str | None
    source: SourceLine | None


class StreamWatch:
    """Vector clocks of streams, fed with operators and calls of torch.cuda's streams and events.

    CUDA rule: work on another stream belongs to a capture only if that stream has waited for the
    capturing one (fork), and the capture can end only if the capturing one has waited for it
    afterwards (join).
    """

    def __init__(self, device: torch.device) -> None:
        """The current stream is that of the iteration."""
        self._device = device
        self._main = self._stream()
        self._clocks: dict[int, _Clock] = {self._main: {self._main: 0}}
        self._events: dict[int, _Clock] = {}  # by id
        self._last: dict[int, StreamUse] = {}
        self._unforked: dict[int, StreamUse] = {}
        self._kept: list[torch.cuda.Event] = []  # so that no event's id is used twice

    def on_op(self, op: str, module_path: str | None, source: SourceLine | None) -> None:
        """Note an operator on the current stream.

        Autograd runs the gradient of what ran on a side stream there as well; it forks and joins
        that stream by itself, below Python, so of a backward pass only the iteration's own stream
        counts. Whether a hook joins what it has forked is left to the driver.
        """
        stream = self._stream()
        if stream != self._main and is_in_backward():
            return
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self._last[stream] = StreamUse(op, module_path, source)
        if self._main not in clock:
            self._unforked.setdefault(stream, self._last[stream])

    def on_call(self, frame: FrameType) -> Refusal | None:
        """Note a call in torch/cuda/streams.py; refuse to wait for an event from before.

        Only Event.record and Event.wait matter: all other ways to order streams are made of these.
        """
        event, given = frame.f_locals.get("self"), frame.f_locals.get("stream")
        if not isinstance(event, torch.cuda.Event):
            return None
        stream = self._stream() if given is None else int(given.cuda_stream)
        clock = self._clocks.setdefault(stream, {})
        if frame.f_code.co_name == "record":
            self._events[id(event)] = dict(clock)
            self._kept.append(event)
        elif frame.f_code.co_name == "wait":
            known = self._events.get(id(event))
            if known is None:
                return _EVENT_FROM_BEFORE
            for other, count in known.items():
                clock[other] = max(clock.get(other, 0), count)
        return None

    def findings(self) -> Iterator[tuple[StreamUse, Refusal]]:
        """Yield what ran on a side stream that was not forked, or that was not joined."""
        joined = self._clocks[self._main]
        for stream, use in self._last.items():
            if stream in self._unforked:
                first = self._unforked[stream]
                yield first, _UNFORKED.of(first.op)
            elif self._clocks[stream].get(stream, 0) > joined.get(stream, 0):
                yield use, _NOT_JOINED.of(use.op)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)
