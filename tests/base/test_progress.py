"""What takes long is shown at a terminal, and nowhere else."""

import io
import sys

import pytest

from graphfsdp.base.progress import shown_when_slow
from time_limits import until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "after_s", "is_shown"),
    [(Terminal(), 0.01, True), (Terminal(), 60.0, False), (io.StringIO(), 0.01, False)],
    ids=["slow", "quick", "no terminal"],
)
def test_what_lasts_is_shown_on_a_terminal(
    stream: io.StringIO, after_s: float, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with shown_when_slow("recording", after_s):
        if is_shown:
            until(lambda: "recording" in stream.getvalue(), 30)
    assert ("recording" in stream.getvalue()) is is_shown
