"""Which streams an iteration uses, and whether each forks from its own stream and rejoins it."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import torch

from graphfsdp._capture.rules.refusals import ISOLATION, UNJOINED, Refusal
from graphfsdp.base.hazards import HazardKind, SourceLine
from graphfsdp.base.torch_internals import is_in_backward

_Clock = dict[Hashable, int]  # by stream: how many of its operators are known to be over

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


@dataclass
class StreamBook:
    """Vector clocks of streams, fed with what an iteration does.

    CUDA rule: work on another stream belongs to a capture only if that stream has waited for the
    capturing one (fork), and the capture can end only if the capturing one has waited for it
    afterwards (join).

    Attributes:
        main: The stream that the iteration starts on.
    """

    main: Hashable
    _clocks: dict[Hashable, _Clock] = field(default_factory=dict)
    _events: dict[Hashable, _Clock] = field(default_factory=dict)
    _last: dict[Hashable, StreamUse] = field(default_factory=dict)
    _unforked: dict[Hashable, StreamUse] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # so that no event's id is used twice

    def __post_init__(self) -> None:
        self._clocks[self.main] = {self.main: 0}

    def use(
        self, stream: Hashable, op: str, module_path: str | None, source: SourceLine | None
    ) -> None:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self._last[stream] = StreamUse(op, module_path, source)
        if self.main not in clock:
            self._unforked.setdefault(stream, self._last[stream])

    def record(self, event: Hashable, stream: Hashable, keep: object = None) -> None:
        self._events[event] = dict(self._clocks.setdefault(stream, {}))
        self._kept.append(keep)

    def wait(self, stream: Hashable, event: Hashable) -> Refusal | None:
        """Note that a stream waits for an event; refuse one that was recorded before."""
        known = self._events.get(event)
        if known is None:
            return _EVENT_FROM_BEFORE
        clock = self._clocks.setdefault(stream, {})
        for other, count in known.items():
            clock[other] = max(clock.get(other, 0), count)
        return None

    def findings(self) -> Iterator[tuple[StreamUse, Refusal]]:
        joined = self._clocks[self.main]
        for stream, use in self._last.items():
            if stream in self._unforked:
                first = self._unforked[stream]
                yield first, _UNFORKED.of(first.op)
            elif self._clocks[stream].get(stream, 0) > joined.get(stream, 0):
                yield use, _NOT_JOINED.of(use.op)


class StreamWatch:
    """Feeds the book from operators and from calls of torch.cuda's streams and events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.book = StreamBook(_key(torch.cuda.current_stream(device)))

    def on_op(self, op: str, module_path: str | None, source: SourceLine | None) -> None:
        """Note an operator on the current stream.

        Autograd runs the gradient of what ran on a side stream there as well; it forks and joins
        that stream by itself, below Python, so of a backward pass only the iteration's own stream
        counts. Whether a hook joins what it has forked is left to the driver.
        """
        stream = _key(torch.cuda.current_stream(self._device))
        if stream == self.book.main or not is_in_backward():
            self.book.use(stream, op, module_path, source)

    def on_call(self, frame: FrameType) -> Refusal | None:
        """Note a call in torch/cuda/streams.py; only Event.record and Event.wait matter.

        All other ways to order streams are made of these two.
        """
        event = frame.f_locals.get("self")
        if not isinstance(event, torch.cuda.Event):
            return None
        stream = frame.f_locals.get("stream")
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if frame.f_code.co_name == "record":
            self.book.record(id(event), _key(stream), keep=event)
        elif frame.f_code.co_name == "wait":
            return self.book.wait(_key(stream), id(event))
        return None


def _key(stream: torch.cuda.Stream) -> int:
    return int(stream.cuda_stream)
