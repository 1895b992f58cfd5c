"""Streams of an iteration: each has to fork from the first one and to join it again."""

import pytest

from graphfsdp import HazardKind
from graphfsdp._capture.rules.streams import StreamBook
from graphfsdp.base.hazards import SourceLine

LINE = SourceLine("train.py", 7, "forward")
STREAM = HazardKind.STREAM
Step = tuple[str, ...]

# A stream that waits for another one records an event there and waits for it.
FORKS: tuple[Step, ...] = (("wait", "side", "main"), ("use", "side"))
PROGRAMS: dict[str, tuple[tuple[Step, ...], list[tuple[str, HazardKind, int | None]]]] = {
    "one stream": ((("use", "main"),), []),
    "forks and joins": ((("use", "main"), *FORKS, ("wait", "main", "side")), []),
    "works after the join": (
        (*FORKS, ("wait", "main", "side"), ("use", "side", "aten.copy_")),
        [("aten.copy_", STREAM, 904)],
    ),
    "never forked": (
        (
            *(("use", "main"), ("use", "side", "aten.first"), ("use", "side", "aten.second")),
            ("wait", "main", "side"),
        ),
        [("aten.first", STREAM, None)],
    ),
    "joined by nobody": (
        (*FORKS, ("wait", "third", "side"), ("use", "third")),
        [("aten.mm", STREAM, 904)] * 2,
    ),
    "joins through another one": (
        (*FORKS, ("wait", "third", "side"), ("use", "third"), ("wait", "main", "third")),
        [],
    ),
    "an event that was recorded too early": (
        (("wait", "side", "main"), ("record", "side"), ("use", "side"), ("wait", "main")),
        [("aten.mm", STREAM, 904)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_stream_has_to_fork_and_to_join(name: str) -> None:
    program, expected = PROGRAMS[name]
    book, event = StreamBook("main"), object()
    for action, stream, *more in program:
        if action == "use":
            book.use(stream, more[0] if more else "aten.mm", "body", LINE)
            continue
        if more or action == "record":
            event = object()
            book.record(id(event), more[0] if more else stream, keep=event)
        assert action == "record" or book.wait(stream, id(event)) is None
    found = list(book.findings())
    assert [(use.op, refusal.kind, refusal.cuda_error) for use, refusal in found] == expected
    for use, refusal in found:
        assert (use.module_path, use.source) == ("body", LINE)
        assert refusal.cuda_error is None or "wait_stream(side_stream)" in refusal.message


@pytest.mark.parametrize("stream", ["main", "side"])
def test_an_event_from_before_the_iteration_is_refused(stream: str) -> None:
    refusal = StreamBook("main").wait(stream, 12345)
    assert refusal is not None
    assert refusal.kind is HazardKind.STREAM
    assert refusal.cuda_error == 905
