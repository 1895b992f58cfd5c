"""Progress is told to whoever asks, and to nobody else."""

from graphfsdp.base.progress import say, telling


def test_what_is_said_is_told_to_the_innermost_listener() -> None:
    outer: list[str] = []
    inner: list[str] = []
    say("to nobody")
    with telling(outer.append):
        say("one")
        with telling(inner.append):
            say("two")
        say("three")
    say("to nobody")
    assert (outer, inner) == (["one", "three"], ["two"])
