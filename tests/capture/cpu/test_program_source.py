"""Programs compiled in parts: what crosses from one to the next, what dies where, and the memory
that Python's compiler takes meanwhile."""

import gc
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfsdp._capture.cpu.program import ProgramSource

NUM_FILLERS = 200  # several parts


def fill(source: ProgramSource) -> None:
    for _ in range(NUM_FILLERS):
        source.add("tick()")


def test_values_cross_any_number_of_parts() -> None:
    ticks: list[int] = []
    namespace: dict[str, Any] = {"tick": lambda: ticks.append(1), "x": torch.arange(3.0)}
    source = ProgramSource(namespace)
    source.add("v0 = x + 1", ["v0"])
    source.add("v1 = x + 2", ["v1"])
    fill(source)
    source.add("[v2, _] = [v0 * v1, v0]; _ = None", ["v2"])
    source.drop(["v0", "v1"])
    fill(source)
    source.add("x.add_(1)")
    replay = source.finish(["v2", "v2"])
    for first in (0, 1, 2):
        x = torch.arange(3.0) + first
        assert all(torch.equal(result, (x + 1) * (x + 2)) for result in replay())
        assert len(ticks) == 2 * NUM_FILLERS * (first + 1)


def test_a_value_dies_where_it_is_dropped_and_not_with_the_program() -> None:
    refs: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def make() -> Tensor:
        made = torch.ones(2)
        refs.append(weakref.ref(made))
        return made

    namespace = {"make": make, "look": lambda: alive.append(refs[-1]() is not None)}
    namespace["tick"] = lambda: None
    source = ProgramSource(namespace)
    source.add("v0 = make()", ["v0"])
    fill(source)
    source.add("look()")
    source.drop(["v0"])
    source.add("look()")
    fill(source)
    replay = source.finish([])
    assert replay() == ()
    assert alive == [True, False]


def test_a_replay_that_fails_holds_nothing_for_the_next_one() -> None:
    fails = [True]

    def maybe() -> None:
        if fails.pop() if fails else False:
            raise KeyboardInterrupt

    source = ProgramSource({"x": torch.ones(2), "maybe": maybe, "tick": lambda: None})
    source.add("v0 = x * 3", ["v0"])
    fill(source)
    source.add("maybe()")
    fill(source)
    replay = source.finish(["v0"])
    with pytest.raises(KeyboardInterrupt):
        replay()
    assert torch.equal(replay()[0], torch.full((2,), 3.0))


def test_a_program_nobody_holds_is_freed_without_the_collector() -> None:
    x = torch.ones(2)
    ref = weakref.ref(x)
    source = ProgramSource({"x": x, "tick": lambda: None})
    fill(source)
    source.add("v0 = x + 1", ["v0"])
    replay = source.finish(["v0"])
    del x, source
    gc.disable()
    try:
        assert ref() is not None
        del replay
        assert ref() is None
    finally:
        gc.enable()


def test_compiling_takes_no_more_memory_for_a_longer_program() -> None:
    def peak_over_program(num_lines: int) -> int:
        tracemalloc.start()
        try:
            source = ProgramSource({"f": torch.mul, "x": torch.ones(2)})
            for index in range(num_lines):
                source.add(f"v{index} = f(x, 2.0, out=x)", [f"v{index}"])
                source.drop([f"v{index}"])
            replay = source.finish(["x"])
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert callable(replay)
        return peak - held

    peak_over_program(100)
    short, long = peak_over_program(200), peak_over_program(2000)
    assert long < 1.5 * short < 1 << 20, (short, long)
