"""What is shown of a run: phases in a profiler, none of them in a recording; what lasts."""

import io
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphfsdp.base.progress import shown_when_slow
from make_step import make_step
from time_limits import until

CPU = torch.device("cpu")
RANGE_PREFIX = "graphfsdp: "


def profiler() -> profile:
    # acc_events: torch 2.11 warns of a second profile in a process otherwise.
    return profile(activities=[ProfilerActivity.CPU], acc_events=True)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("none", {"copy-in", "eager", "forward", "backward", "optimizer"}),
        ("forward_backward", {"copy-in", "replay", "optimizer"}),
        ("full_iteration", {"copy-in", "replay"}),
    ],
)
def test_a_profile_names_the_phases_of_every_step(scope: str, expected: set[str]) -> None:
    step, _, _, next_batch = make_step(CPU, scope=scope)
    with step:
        for _ in range(5):
            step(*next_batch())
        with profiler() as found:
            for _ in range(2):
                step(*next_batch())
    calls = {item.key: item.count for item in found.key_averages()}
    named = {name.removeprefix(RANGE_PREFIX) for name in calls if name.startswith(RANGE_PREFIX)}
    assert named == expected
    assert all(calls[RANGE_PREFIX + name] == 2 for name in expected)


def test_ranges_are_there_under_a_profiler_alone_and_no_recording_holds_them() -> None:
    step, _, _, next_batch = make_step(CPU)
    plain, *_ = make_step(CPU)
    with step, plain:
        with profiler() as found:
            for _ in range(5):
                step(*next_batch())
        for _ in range(5):
            plain(*next_batch())
        assert step.report().op_counts == plain.report().op_counts
    seen = {item.name for item in found.events() or () if item.name.startswith(RANGE_PREFIX)}
    phases = {"warm-up", "capture", "forward", "backward", "optimizer", "replay", "copy-in"}
    assert seen >= {RANGE_PREFIX + name for name in phases}


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
