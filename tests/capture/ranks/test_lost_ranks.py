"""A rank that ends in the middle: the others hear its name within moments, and lose nothing."""

import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_rollback_ranks import batch, build, losses_without_faults
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from faults import Fault, FaultMode, InjectedError, World
from graphfsdp import Phase
from graphfsdp._capture.trace.op_tensors import is_wrapper_subclass
from ranks import PRELOADED, RankPool

NUM_RANKS = 3
VICTIM = 1
TIMEOUT_S = 100  # of the process group: nobody may have to wait for it


class EndAt(TorchDispatchMode):
    """Ends this process in front of an operator, as a failing machine does."""

    def __init__(self, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_left = index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented
        if self._num_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_left -= 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Heard:
    """What a surviving rank has met."""

    kind: str
    text: str
    seconds: float
    notes: list[str]
    phase: str
    again: str


def survive(rank: int, folder: str, index: int) -> None:
    """Train until one rank ends in a call; write down what it is like on the others."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    step, model, optim = build("optim_grads_params", "full_iteration")
    for earlier in range(index):
        step(batch(earlier))
    world = World(model, optim)
    started = time.monotonic()
    kinds = (graphfsdp.RankFailedError, graphfsdp.CaptureError)
    with pytest.raises(kinds) as caught, EndAt(12 if rank == VICTIM else -1):
        step(batch(index))
    seconds = time.monotonic() - started
    world.assert_unchanged("a rank has ended", without_gradients=True)
    phase = step.phase
    again = ""
    if phase is Phase.BROKEN:
        with pytest.raises(graphfsdp.PhaseError) as refused:
            step(batch(index))
        again = str(refused.value)
    notes = getattr(caught.value, "__notes__", [])
    heard = Heard(caught.type.__name__, str(caught.value), seconds, notes, phase.value, again)
    text = json.dumps(dataclasses.asdict(heard))
    (pathlib.Path(folder) / f"{rank}.tmp").write_text(text)
    (pathlib.Path(folder) / f"{rank}.tmp").rename(pathlib.Path(folder) / f"{rank}.json")
    # Not before all have written: whoever ends closes the connections of the others.
    while len(list(pathlib.Path(folder).glob("*.json"))) < NUM_RANKS - 1:
        time.sleep(0.01)
    os._exit(0)


def run_until_one_ends(folder: pathlib.Path, index: int) -> list[Heard]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    arguments = (str(folder), index)
    processes = [context.Process(target=survive, args=(r, *arguments)) for r in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    texts = [(folder / f"{rank}.json").read_text() for rank in range(NUM_RANKS) if rank != VICTIM]
    return [Heard(**json.loads(text)) for text in texts]


def test_a_rank_that_ends_in_a_replay_is_named_at_once(tmp_path: pathlib.Path) -> None:
    for heard in run_until_one_ends(tmp_path, 4):
        assert heard.kind == "RankFailedError"
        assert heard.text.startswith("rank 1 of 3 ended")
        assert "process group is of no use any more. Remedy:" in heard.text
        assert heard.seconds < TIMEOUT_S / 5
        assert "the replay was undone" in heard.notes[0]
        assert "can be called again" not in heard.notes[0]
        assert heard.phase == "broken"
        assert "rank 1 of 3 ended" in heard.again


def test_a_rank_that_ends_in_a_warm_up_is_named_at_once(tmp_path: pathlib.Path) -> None:
    for heard in run_until_one_ends(tmp_path, 1):
        assert heard.kind == "CaptureError"
        assert heard.text.startswith("rank 1 of 3 ended")
        assert "as they were before this iteration" in heard.text
        assert heard.seconds < TIMEOUT_S / 5


def fails_in_its_collectives(strategy: str) -> list[str]:
    """Rank 1 fails in each operator of a replay, collectives included, before and after them."""
    expected = losses_without_faults(strategy, 5)[4]
    step, model, optim = build(strategy, "full_iteration")
    for index in range(4):
        step(batch(index))
    world = World(model, optim)
    me = dist.get_rank()
    fired = []
    for position, after in itertools.product(range(2, 40), (False, True)):
        mode = FaultMode(position if me else -1, Fault.ERROR, after=after)
        try:
            with mode:
                loss = step(batch(4))
        except (InjectedError, graphfsdp.RankFailedError, graphfsdp.PhaseError) as error:
            if step.phase is Phase.BROKEN:
                break  # likewise; a rank that is late has heard of it before it began
            world.assert_unchanged(f"{mode.fired} at {position}", without_gradients=True)
            fired.append(f"{type(error).__name__} {position} {after} {mode.fired}")
        else:  # it was behind the last collective before the optimizer
            assert me == 0
            assert torch.equal(loss, expected)
            break
    return fired


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_an_error_in_the_operator_of_a_collective_lets_the_others_out(
    ranks2: RankPool, strategy: str
) -> None:
    others, mine = ranks2.run(fails_in_its_collectives, strategy)
    assert len(others) == len(mine) >= 40
    assert all(text.startswith("RankFailedError") for text in others)
    assert all(text.startswith("InjectedError") for text in mine)
    for after, num_collectives in ((False, 2), (True, 1)):
        assert sum(f"{after} graphfsdp." in text for text in mine) >= num_collectives
