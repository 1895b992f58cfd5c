"""Streams of an iteration: each has to fork from the first one and to join it again."""

import pytest

from graphfsdp import HazardKind
from graphfsdp._capture.rules.streams import StreamBook
from graphfsdp.base.hazards import SourceLine

LINE = SourceLine("train.py", 7, "forward")


def wait_stream(book: StreamBook, waiter: str, waited_for: str) -> None:
    event = object()
    book.record(id(event), waited_for, keep=event)
    assert book.wait(waiter, id(event)) is None


def use(book: StreamBook, stream: str, op: str = "aten.mm") -> None:
    book.use(stream, op, "body", LINE)


def findings(book: StreamBook) -> list[tuple[str, HazardKind, int | None]]:
    return [(use.op, refusal.kind, refusal.cuda_error) for use, refusal in book.findings()]


def test_one_stream_is_fine() -> None:
    book = StreamBook("main")
    use(book, "main")
    assert findings(book) == []


def test_a_stream_that_forks_and_joins_is_fine() -> None:
    book = StreamBook("main")
    use(book, "main")
    wait_stream(book, "side", "main")
    use(book, "side")
    wait_stream(book, "main", "side")
    assert findings(book) == []


def test_work_after_the_join_is_named_with_its_place() -> None:
    book = StreamBook("main")
    wait_stream(book, "side", "main")
    use(book, "side")
    wait_stream(book, "main", "side")
    use(book, "side", "aten.copy_")
    assert findings(book) == [("aten.copy_", HazardKind.STREAM, 904)]
    ((use_after, refusal),) = book.findings()
    assert (use_after.module_path, use_after.source) == ("body", LINE)
    assert "wait_stream(side_stream)" in refusal.message


def test_a_stream_that_never_forked_is_named_by_its_first_use() -> None:
    book = StreamBook("main")
    use(book, "main")
    use(book, "side", "aten.first")
    use(book, "side", "aten.second")
    wait_stream(book, "main", "side")
    assert findings(book) == [("aten.first", HazardKind.STREAM, None)]


def test_a_stream_may_join_through_another_one() -> None:
    book = StreamBook("main")
    wait_stream(book, "gather", "main")
    use(book, "gather")
    wait_stream(book, "reduce", "gather")
    use(book, "reduce")
    assert len(findings(book)) == 2
    wait_stream(book, "main", "reduce")
    assert findings(book) == []


def test_an_event_that_was_recorded_too_early_does_not_join() -> None:
    book = StreamBook("main")
    wait_stream(book, "side", "main")
    event = object()
    book.record(id(event), "side", keep=event)
    use(book, "side")
    assert book.wait("main", id(event)) is None
    assert findings(book) == [("aten.mm", HazardKind.STREAM, 904)]


@pytest.mark.parametrize("stream", ["main", "side"])
def test_an_event_from_before_the_iteration_is_refused(stream: str) -> None:
    refusal = StreamBook("main").wait(stream, 12345)
    assert refusal is not None
    assert refusal.kind is HazardKind.STREAM
    assert refusal.cuda_error == 905
