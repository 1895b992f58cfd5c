"""A rank that fails or ends: the others hear who and why within seconds, wherever they wait."""

import dataclasses
import datetime
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphfsdp
from faults_at_operators import Fault, FaultMode, World
from forked_programs import run_source
from graphfsdp import Phase
from rank_steps import batch, build
from ranks import RankPool, fork_server
from time_limits import until

NUM_RANKS = 3
VICTIM = 1
TIMEOUT_S = 3600  # of the process group: nobody may have to wait for it
SECONDS = 20  # in which all is over; it takes about four


@dataclasses.dataclass
class Heard:
    kind: str
    text: str
    notes: list[str]
    phase: str
    again: str


def hear(index: int, strategy: str, fails: Callable[[Any], AbstractContextManager[Any]]) -> Heard:
    """Train until a call fails, on one rank by what ``fails`` does to the step."""
    step, model, optim = build(strategy, "full_iteration")
    for earlier in range(index):
        step(batch(earlier))
    world = World(model, optim)
    with pytest.raises(Exception) as caught, fails(step) as x:  # noqa: PT011, judged by the caller
        step(batch(index) if x is None else x)
    if "stopped while it updated weights" not in str(getattr(caught.value, "__notes__", "")):
        world.assert_unchanged("a rank has failed", without_gradients=True)
    again = ""
    if step.phase is Phase.BROKEN:
        with pytest.raises(graphfsdp.PhaseError) as refused:
            step(batch(index))
        again = str(refused.value)
    notes = list(getattr(caught.value, "__notes__", []))
    return Heard(caught.type.__name__, str(caught.value), notes, step.phase.value, again)


# How the last rank fails.


def in_operator(index: int, fault: Fault) -> Callable[[Any], AbstractContextManager[Any]]:
    @contextmanager
    def fails(step: Any) -> Iterator[None]:
        with FaultMode(index, fault, after=False):
            yield

    return fails


@contextmanager
def of_batch(step: Any) -> Iterator[Any]:
    yield batch(0)[:2]


@contextmanager
def of_guard(step: Any) -> Iterator[None]:
    step._runner._engine.model.eval()
    try:
        yield
    finally:
        step._runner._engine.model.train()


WARM_UP, CAPTURE, REPLAY = 1, 2, 4
CASES: dict[str, tuple[int, str, Callable[[Any], AbstractContextManager[Any]]]] = {
    "batch in a warm-up": (WARM_UP, "BatchMismatchError", of_batch),
    "operator in a warm-up": (WARM_UP, "InjectedError", in_operator(8, Fault.ERROR)),
    "operator in the capture": (CAPTURE, "OutOfMemoryError", in_operator(8, Fault.OUT_OF_MEMORY)),
    "batch in a replay": (REPLAY, "BatchMismatchError", of_batch),
    "guard in a replay": (REPLAY, "GuardError", of_guard),
    "operator in a replay": (REPLAY, "OutOfMemoryError", in_operator(3, Fault.OUT_OF_MEMORY)),
}


def fails_on_the_last_rank(case: str, strategy: str) -> Heard:
    index, _, fails = CASES[case]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return hear(index, strategy, fails if is_last else lambda step: nullcontext())


@pytest.mark.parametrize(
    ("num_ranks", "case", "strategy"),
    [
        *((2, case, "optim_grads_params") for case in CASES),
        *((4, f"operator in a {what}", "optim_grads_params") for what in ("warm-up", "replay")),
        (2, "operator in a replay", "no_shard"),  # ranks that only reduce gradients
    ],
)
def test_a_rank_that_fails_is_named_at_once(num_ranks: int, case: str, strategy: str) -> None:
    index, kind, _ = CASES[case]
    pool = RankPool(num_ranks)
    try:
        *others, failed = pool.run(fails_on_the_last_rank, case, strategy, limit_s=SECONDS)
    finally:
        pool.close(force=True)
    name = f"rank {num_ranks - 1} of {num_ranks} failed in iteration {index + 1}: {kind}"
    assert failed.kind == kind
    assert "process groups were aborted. Remedy:" in failed.notes[-1]
    for heard in others:
        assert heard.kind == "RankFailedError"
        assert heard.text.startswith(name)
        assert "load the last checkpoint" in heard.text
    for heard in (*others, failed):
        assert heard.phase == "broken"
        assert name in heard.again


def fails_in_the_optimizer() -> tuple[str, str]:
    """Behind the last collective of a replay: the other rank has stepped, this one has not."""
    step, *_ = build("optim_grads_params", "full_iteration")
    for index in range(4):
        step(batch(index))
    counts = FaultMode(-1, Fault.ERROR, after=False)
    with counts:
        step(batch(4))
    place = counts.num_ops - 3 if dist.get_rank() else -1
    texts = []
    for index in (5, 6):
        try:
            with FaultMode(place, Fault.ERROR, after=False):
                step(batch(index))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return step.phase.value, texts[0]


def test_ranks_whose_weights_differ_do_not_train_on() -> None:
    pool = RankPool(2)
    try:
        (phase, heard), (phase_of_failed, failed) = pool.run(fails_in_the_optimizer)
    finally:
        pool.close(force=True)
    assert phase == phase_of_failed == "broken"
    assert heard.startswith("RankFailedError: rank 1 of 2 failed in iteration 6: InjectedError")
    assert failed.startswith("InjectedError")


class Ends(FaultMode):
    """Ends this process in front of an operator, as a failing machine does."""

    def _fire(self, name: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


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

    @contextmanager
    def ends(step: Any) -> Iterator[None]:
        with Ends(12 if rank == VICTIM else -1, Fault.ERROR, after=False):
            yield

    heard = hear(index, "optim_grads_params", ends)
    (pathlib.Path(folder) / f"{rank}.tmp").write_text(json.dumps(dataclasses.asdict(heard)))
    (pathlib.Path(folder) / f"{rank}.tmp").rename(pathlib.Path(folder) / f"{rank}.json")
    # Not before all have written: whoever ends closes the connections of the others.
    while len(list(pathlib.Path(folder).glob("*.json"))) < NUM_RANKS - 1:
        time.sleep(0.01)
    os._exit(0)


def exit_codes(processes: Sequence[Any]) -> list[int | None]:
    until(lambda: all(process.exitcode is not None for process in processes), 2 * SECONDS)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def test_a_rank_that_ends_is_named_at_once(tmp_path: pathlib.Path) -> None:
    context = fork_server()
    runs = {}
    for index in (WARM_UP, REPLAY):  # side by side: they wait more than they work
        folder = tmp_path / str(index)
        folder.mkdir()
        runs[folder] = [
            context.Process(target=survive, args=(rank, str(folder), index))
            for rank in range(NUM_RANKS)
        ]
        for process in runs[folder]:
            process.start()
    for folder, processes in runs.items():
        assert exit_codes(processes) == [0, -signal.SIGKILL, 0]
        for rank in {*range(NUM_RANKS)} - {VICTIM}:
            heard = Heard(**json.loads((folder / f"{rank}.json").read_text()))
            assert heard.kind == "RankFailedError"
            assert heard.text.startswith("rank 1 of 3 ended, or did not answer")
            assert heard.phase == "broken"
            assert "rank 1 of 3 ended" in heard.again


DESTROYED = """
import sys, torch, graphfsdp
import torch.distributed as dist
from torch import nn
from graphfsdp.optim import FusedAdam

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
model = nn.Linear(4, 1)
graphfsdp.fully_shard(model)
step = graphfsdp.capture(
    model, FusedAdam(model.parameters()), loss_fn=lambda model, x: model(x).sum(), warmup_steps=1
)
step(torch.ones(2, 4))
if sys.argv[2] == "replays":
    step(torch.ones(2, 4))
dist.destroy_process_group()
try:
    step(torch.ones(2, 4))
except graphfsdp.PhaseError as error:
    print(error)
step.close()
"""


@pytest.mark.parametrize("phase", ["captures", "replays"])
def test_a_call_after_the_process_group_is_refused(phase: str, tmp_path: pathlib.Path) -> None:
    ended = run_source(DESTROYED, f"file://{tmp_path}/store", phase)
    assert ended.returncode == 0, ended.stderr
    assert "after destroy_process_group" in ended.stdout
    assert "Remedy: step.close() first" in ended.stdout
