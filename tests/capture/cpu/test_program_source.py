"""Programs compiled in parts: a replay that fails in the middle, and the compiler's memory."""

import tracemalloc

import pytest
import torch

from graphfsdp._capture.cpu.program import ProgramSource

NUM_FILLERS = 200  # several parts


def fill(source: ProgramSource) -> None:
    for _ in range(NUM_FILLERS):
        source.add("tick()")


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
