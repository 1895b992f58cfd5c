"""Which streams an iteration uses, and whether each forks from its own stream and rejoins it."""

from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch

from graphfsdp._capture.rules.refusals import ISOLATION, UNJOINED, Refusal
from graphfsdp.base.hazards import HazardKind, SourceLine
from graphfsdp.base.torch_internals import is_in_backward

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
