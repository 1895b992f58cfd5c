"""A rank that fails or ends: the others hear who and why within seconds, wherever they wait."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist

import graphfsdp
import ranks
from faults_at_operators import Fault, FaultMode, World
from graphfsdp import Phase
from rank_steps import batch, build
from ranks import RankError, lost_pool

VICTIM = 1
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
    with lost_pool(num_ranks) as pool:
        *others, failed = pool.run(fails_on_the_last_rank, case, strategy, limit_s=SECONDS)
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
    with lost_pool(2) as pool:
        (phase, heard), (phase_of_failed, failed) = pool.run(fails_in_the_optimizer)
    assert phase == phase_of_failed == "broken"
    assert heard.startswith("RankFailedError: rank 1 of 2 failed in iteration 6: InjectedError")
    assert failed.startswith("InjectedError")


class Ends(FaultMode):
    """Ends this process in front of an operator, as a failing machine does."""

    def _fire(self, name: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def survive(index: int) -> None:
    """Train until one rank ends in a call."""

    @contextmanager
    def ends(step: Any) -> Iterator[None]:
        with Ends(12 if dist.get_rank() == VICTIM else -1, Fault.ERROR, after=False):
            yield

    heard = hear(index, "optim_grads_params", ends)
    assert heard.kind == "RankFailedError"
    assert heard.text.startswith("rank 1 of 3 ended, or did not answer")
    assert heard.phase == "broken"
    assert "rank 1 of 3 ended" in heard.again


@pytest.mark.parametrize("index", [WARM_UP, REPLAY])
def test_a_rank_that_ends_is_named_at_once(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", SECONDS)
    ended = f"rank 1 failed:\nthe process ended with exit code {-signal.SIGKILL}"
    with lost_pool(3) as pool, pytest.raises(RankError) as caught:
        pool.run(survive, index, limit_s=2 * SECONDS)
    assert str(caught.value) == f"rank 0 succeeded\n{ended}\nrank 2 succeeded"


def calls_behind_the_group(num_calls: int) -> None:
    step, *_ = build("optim_grads_params", "full_iteration", warmup_steps=1)
    x = batch(0)
    for _ in range(num_calls):
        step(x)
    dist.destroy_process_group()
    refusal = "after destroy_process_group(.|\n)*Remedy: step.close.. first"
    with pytest.raises(graphfsdp.PhaseError, match=refusal):
        step(x)
    step.close()


@pytest.mark.parametrize("num_calls", [1, 2], ids=["captures", "replays"])
def test_a_call_after_the_process_group_is_refused(num_calls: int) -> None:
    with lost_pool(1) as pool:
        pool.run(calls_behind_the_group, num_calls)
