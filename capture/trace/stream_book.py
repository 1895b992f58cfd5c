"""Follows which streams an iteration uses, and whether each forks from it and rejoins it."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from graphfsdp._capture.rules.refusals import ISOLATION, UNJOINED, Refusal
from graphfsdp.base.hazards import HazardKind, SourceLine

_Clock = dict[Hashable, int]  # by stream: how many of its operators are known to be over


@dataclass
class _Use:
    """Last operator on a stream."""

    op: str
    module_path: str | None
    source: SourceLine | None


@dataclass(frozen=True)
class StreamFinding:
    """A side stream that breaks the rules, and where it was used last."""

    op: str
    module_path: str | None
    source: SourceLine | None
    refusal: Refusal


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
    _last: dict[Hashable, _Use] = field(default_factory=dict)
    _unforked: dict[Hashable, _Use] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # so that no event's id is used twice

    def __post_init__(self) -> None:
        self._clocks[self.main] = {self.main: 0}

    def use(
        self, stream: Hashable, op: str, module_path: str | None, source: SourceLine | None
    ) -> None:
        """Note an operator on a stream."""
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self._last[stream] = _Use(op, module_path, source)
        if self.main not in clock:
            self._unforked.setdefault(stream, self._last[stream])

    def record(self, event: Hashable, stream: Hashable, keep: object = None) -> None:
        """Note that an event was recorded on a stream."""
        self._events[event] = dict(self._clocks.setdefault(stream, {}))
        self._kept.append(keep)

    def wait(self, stream: Hashable, event: Hashable) -> Refusal | None:
        """Note that a stream waits for an event.

        Returns:
            A refusal if the event was recorded before the iteration.
        """
        known = self._events.get(event)
        if known is None:
            return Refusal(
                "the iteration waits for an event that was recorded before it; in a capture the "
                "dependency would cross its border",
                "record and wait for events inside one iteration, and start collectives inside it",
                HazardKind.STREAM,
                ISOLATION,
            )
        clock = self._clocks.setdefault(stream, {})
        for other, count in known.items():
            clock[other] = max(clock.get(other, 0), count)
        return None

    def findings(self) -> Iterator[StreamFinding]:
        """Yield what is wrong when the iteration is over."""
        joined = self._clocks[self.main]
        for stream, use in self._last.items():
            if stream == self.main:
                continue
            if stream in self._unforked:
                first = self._unforked[stream]
                yield _finding(
                    first,
                    "runs on a side stream that has not waited for the iteration's own stream; "
                    "it would not be part of the graph",
                    "start each use of a side stream with "
                    "side_stream.wait_stream(torch.cuda.current_stream())",
                    None,
                )
            elif self._clocks[stream].get(stream, 0) > joined.get(stream, 0):
                yield _finding(
                    use,
                    "is the last operator on a side stream that the iteration's own stream does "
                    "not wait for; a capture cannot end with a fork that was not joined",
                    "end each use of a side stream with "
                    "torch.cuda.current_stream().wait_stream(side_stream)",
                    UNJOINED,
                )


def _finding(use: _Use, what: str, remedy: str, cuda_error: int | None) -> StreamFinding:
    refusal = Refusal(f"{use.op} {what}", remedy, HazardKind.STREAM, cuda_error)
    return StreamFinding(use.op, use.module_path, use.source, refusal)
