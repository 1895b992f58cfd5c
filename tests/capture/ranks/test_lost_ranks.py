"""A rank that fails, ends or does otherwise: the others hear who and why, wherever they wait.

They go on where all of it can be undone, and within seconds not where it cannot.
"""

import dataclasses
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
import pipeline_models
import ranks
from counting_net import mean_square
from faults_at_operators import FAULTS, Fault, FaultMode, World
from forked_programs import run_to_their_ends
from graphfsdp import Phase
from graphfsdp._capture.ranks import ranks as capturing_ranks
from graphfsdp.base.collectives import Interruptible
from graphfsdp.base.rank_agreement import RankStore
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, quick_garbage_collection, snapshot
from hidden_count import Unseen
from ranks import RankError, lost_pool, on_ranks, rank_device, world_group
from sharding_helpers import hybrid_mesh
from time_limits import slowdown

WIDTH = 4
VICTIM = 1
SECONDS = 20  # in which all is over; it takes about four


def build(
    strategy: str,
    scope: str,
    *between: nn.Module,
    axes: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Any, nn.Module, FusedAdam]:
    """``between``: modules behind the first layer; ``axes``: arguments of ``fully_shard``."""
    quick_garbage_collection()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *between, nn.Dropout(0.2), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(*layers).to(rank_device())
    graphfsdp.fully_shard(model[0], strategy=strategy, **axes)
    graphfsdp.fully_shard(model, strategy=strategy, **axes)
    optim = FusedAdam(model.parameters(), lr=1e-2)
    options = {"loss_fn": mean_square, "max_grad_norm": 0.5, "warmup_steps": 2, **options}
    return graphfsdp.capture(model, optim, scope=scope, **options), model, optim


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(rank_device())


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


def begin(**options: Any) -> None:
    build("optim_grads_params", "full_iteration", **options)[0](batch(0))  # or at once


def begin_a_pipeline(schedule: str = "1f1b") -> None:
    made = pipeline_models.schedule_of(pipeline_models.KINDS[schedule])
    x, target = pipeline_models.batch(0)
    graphfsdp.capture(made, pipeline_models.adam(made))(x, target=target)


def captures_with(options: dict[str, Any]) -> tuple[str, str]:
    """The last rank captures with other options than the others."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    run = begin_a_pipeline if "schedule" in options else begin
    with pytest.raises(graphfsdp.GraphFSDPError) as caught:
        run(**(options if is_last else {}))
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"max_grad_norm": 0.1}, {"microbatches": 2}, {"example_batch": torch.zeros(4, WIDTH)}),
        {"schedule": "gpipe"},
    ],
    ids=str,
)
def test_options_of_capture_that_differ_are_refused_before_the_first_iteration(
    options: dict[str, Any],
) -> None:
    with lost_pool(3) as pool:
        heard = pool.run(captures_with, options, limit_s=SECONDS)
    assert sorted(kind for kind, _ in heard) == ["ConfigError", *["RankFailedError"] * 2]
    for _, text in heard:
        assert f"captures with {next(iter(options))}=" in text


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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at threads on Linux only")
@on_ranks("ranks2")
def test_the_workers_of_gloo_are_found_by_their_name() -> None:
    dist.all_reduce(torch.ones(100_000))
    capturing_ranks.await_gloo_threads()
    states = list(capturing_ranks._gloo_states())
    assert len(states) >= 2
    assert set(states) == {"S"}


@on_ranks("ranks2")
def test_an_old_question_is_answered_by_nobody() -> None:
    """The listening thread may look late, when the calls after the one asked about failed too."""
    store = RankStore([world_group()], "late looks")
    whereabouts = capturing_ranks.Whereabouts(store)
    asked = ""
    for _ in range(2):
        whereabouts.enter("iteration", Interruptible(lambda: None))
        assert whereabouts.come_out(silent_s=30.0)
        whereabouts.leave()
        asked = asked or store.get("asked") or ""
    dist.barrier()
    store.put("asked", asked)
    whereabouts.answer()
    assert not store.has(["lost"])


FAILS = "raise KeyError('the end')"
DESTROYS = "dist.destroy_process_group()"
ENDS_OF_RANKS = [("", FAILS), (DESTROYS, f"step.close(); {DESTROYS}")]  # of the first, the second
ENDS = {
    "nothing": "",
    "exception": FAILS,
    "cycle": "step.me = step",
    "thread": "import threading; threading.Thread(target=lambda: step(x)).start()",
}
ON_A_RANK = """
    import torch, torch.distributed as dist, graphfsdp
    from graphfsdp.optim import FusedAdam
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = torch.nn.Linear(3, 1)
    graphfsdp.fully_shard(model)
    step = graphfsdp.capture(
        model, FusedAdam(model.parameters()), loss_fn=lambda m, x: m(x).sum(), warmup_steps=1
    )
    for _ in range(4):
        step(torch.ones(2, 3))
    print(step.phase.value)
"""
ALONE = """
    import torch, graphfsdp
    model = torch.nn.Linear(3, 1)
    optim = graphfsdp.optim.FusedAdam(model.parameters())
    step = graphfsdp.capture(model, optim, loss_fn=lambda m, x: m(x).sum(), warmup_steps=1)
    x = torch.ones(2, 3)
    for _ in range(4):
        step(x)
    graph = step._runner._recordings.latest.graph
    close = graph.close
    def note():
        print("closed")
        close()
    graph.close = note
"""


def test_programs_that_never_close_their_step_end_in_peace_also_ranks_in_any_order(
    tmp_path: Path,
) -> None:
    programs = [(textwrap.dedent(ALONE), end, "closed") for end in ENDS.values()]
    for index, ends in enumerate(ENDS_OF_RANKS):
        for rank, end in enumerate(ends):
            place = f"store, rank = 'file://{tmp_path}/store{index}', {rank}\n"
            programs.append((place + textwrap.dedent(ON_A_RANK), end, "replay"))
    ended = run_to_their_ends(tmp_path, *(program + end for program, end, _ in programs))
    for (program, end, said), done in zip(programs, ended, strict=True):
        assert done.stdout.split() == [said], (program, end, done.stderr)
        assert done.returncode == int(end == FAILS), (program, end, done.stderr)
        assert ("the end" in done.stderr) is (end == FAILS)
        assert "terminate" not in done.stderr


def losses_without_faults(
    strategy: str, num_calls: int, *between: nn.Module, **options: Any
) -> list[Tensor]:
    step, *_ = build(strategy, "none", *between, **options)
    return [step(batch(index)) for index in range(num_calls)]


class LateError(Exception):
    """An ordinary error of a user, after all collectives of the iteration."""


@pytest.mark.parametrize(
    ("ranks", "strategy", "outer"),
    [
        *(("ranks2", strategy, None) for strategy in ("no_shard", "optim_grads_params")),
        ("ranks4", "optim_grads_params", "optim"),
    ],
)
@on_ranks()
def test_an_error_on_one_rank_undoes_the_iteration_on_all(strategy: str, outer: str | None) -> None:
    """In the optimizer's step hook on the last rank: all roll back and go on, groups are intact."""
    axes: dict[str, Any] = {}
    if outer is not None:  # the first rank shares no group with the last one
        axes = {"mesh": hybrid_mesh(), "outer_strategy": outer}
    last = dist.get_world_size() - 1
    expected = losses_without_faults(strategy, 7, axes=axes)
    fails = {"on": False}

    def hook(*args: object) -> None:
        if fails["on"] and dist.get_rank() == last:
            raise LateError(f"of rank {last}")

    for index in (-1, *range(7)):
        if index <= 0:  # one that has failed in its first call, and another one after it
            step, model, optim = build(strategy, "full_iteration", axes=axes)
            optim.register_step_post_hook(hook)
        if index <= 2:
            world = World(model, optim)
            fails["on"] = True
            message = f"of rank {last}"
            if dist.get_rank() != last:
                who = rf"rank {last} of {last + 1} failed in iteration \d+"
                message = f"{who}: LateError: {message}.*no rank keeps this iteration.*as it was"
            with pytest.raises((LateError, graphfsdp.CaptureError), match=message):
                step(batch(index))
            world.assert_unchanged(f"call {index}")
            fails["on"] = False
        assert index < 0 or torch.equal(step(batch(index)), expected[index]), index
    assert step.report().num_captures == 1


class Reads(nn.Module):
    """Reads a value on the host on rank 1, in one microbatch of two of the capture."""

    def __init__(self, in_microbatch: int) -> None:
        super().__init__()
        self.reads = Unseen(*[False] * (2 * 2 + in_microbatch), True, False)

    def forward(self, x: Tensor) -> Tensor:
        if next(self.reads) and dist.get_rank() == 1:
            x.sum().item()
        return x


@pytest.mark.parametrize(
    ("ranks", "strategy", "in_microbatch"),
    [
        ("ranks2", "optim", 1),
        ("ranks2", "optim_grads_params", 0),
        # The capture ends there, so the ranks have recorded unequally many collectives.
        pytest.param(
            *("gpu_ranks", "optim_grads_params", 1), marks=[pytest.mark.gpu, pytest.mark.multi_gpu]
        ),
    ],
)
@on_ranks()
def test_a_host_read_on_one_rank_rolls_back_all(strategy: str, in_microbatch: int) -> None:
    expected = losses_without_faults(strategy, 7, nn.Identity(), microbatches=2)
    step, model, optim = build(strategy, "full_iteration", Reads(in_microbatch), microbatches=2)
    for index in range(7):
        if index == 2:
            world = World(model, optim)
            words = "reads a value of the iteration on the host"
            if dist.get_rank() != 1:
                words = rf"rank 1 of 2 failed in iteration 3: CaptureError.*{words}"
                words += "(.|\n)*test_lost_ranks.py(.|\n)*no rank keeps this iteration"
            with pytest.raises(graphfsdp.CaptureError, match=words):
                step(batch(index))
            world.assert_unchanged("the read")
        assert torch.equal(step(batch(index)), expected[index]), index
    assert step.report().num_captures == 1


@on_ranks("ranks2")
def test_a_rank_that_fails_waits_for_one_that_is_busy() -> None:
    """Rank 1 fails at the end of an iteration that rank 0 takes long for."""
    slow = slowdown()
    step, model, optim = build("optim_grads_params", "full_iteration")
    step(batch(0))
    world = World(model, optim)

    def hook(*args: object) -> None:
        if dist.get_rank() == 1:
            raise LateError("of rank 1")
        time.sleep(1.5 * slow)

    handle = optim.register_step_post_hook(hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphfsdp._capture.ranks.ranks._SILENT_S", 0.7 * slow)
        with pytest.raises((LateError, graphfsdp.CaptureError), match="of rank 1"):
            step(batch(1))
    world.assert_unchanged("call 1")
    handle.remove()
    step(batch(1))
    assert step.phase is graphfsdp.Phase.WARMUP


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_fault_on_all_ranks_leaves_no_trace_on_any(strategy: str) -> None:
    """At the same operator on both ranks: each says its own error."""
    expected = losses_without_faults(strategy, 6)
    step, model, optim = build(strategy, "full_iteration")
    num_faults = 0
    for index in range(6):
        if index <= 2:
            for position in range(index, 75, 8 if index < 2 else 17):
                quick_garbage_collection()
                world = World(model, optim)
                # Not Ctrl-C: the ranks of the tests ignore that signal.
                fault = (Fault.ERROR, Fault.OUT_OF_MEMORY)[position % 2]
                mode = FaultMode(position, fault, after=position % 3 == 0)
                with pytest.raises(FAULTS), mode:
                    step(batch(index))
                world.assert_unchanged(f"call {index}: {mode.fired} at {position}")
                num_faults += 1
        assert torch.equal(step(batch(index)), expected[index]), index
    assert num_faults >= 10


@on_ranks("ranks2")
def test_a_rank_that_goes_on_eagerly_is_met_by_replays() -> None:
    """Rank 1 changes a number that its graph has baked in, rank 0 does not."""
    losses: list[list[Tensor]] = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(3)
        step, model, optim = build("optim_grads_params", scope, on_change="eager")
        losses.append([])
        dropout: Any = model.get_submodule("1")
        for index in range(11):
            if index == 5 and dist.get_rank() == 1:
                dropout.p = 0.7
            losses[-1].append(step(batch(index % 4)))
        state = snapshot(model, optim)
        if scope == "none":
            expected = state
    assert_same_state(expected, state)
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    assert step.phase is Phase.REPLAY
    calls = step.report().num_calls
    assert (calls["replay"], calls.get("eager", 0)) == ((2, 6) if dist.get_rank() else (8, 0))
    step.close()


def meet_a_new_kind() -> str:
    """Rank 1 has a batch that it has no graph for yet, rank 0 replays."""
    step, *_ = build("optim_grads_params", "full_iteration", on_change="recapture")
    for index in range(5):
        step(batch(index))
    try:
        for _ in range(3):
            step(torch.ones(6 if dist.get_rank() else 4, WIDTH))
    except graphfsdp.RankFailedError as error:
        assert step.phase is Phase.BROKEN
        return str(error)
    return ""


def test_a_kind_that_is_new_to_one_rank_alone_is_refused_on_all() -> None:
    with lost_pool(2) as pool:
        for text in pool.run(meet_a_new_kind):
            assert text.startswith("rank 0 of 2 replayed iteration 6, for whose batch another")
