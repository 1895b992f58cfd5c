"""Who may use a captured step, how many do at a time, who is copied; when it ends, what is left."""

import copy
import gc
import io
import os
import pathlib
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphfsdp
from adam_helpers import make_muon
from counting_net import mean_square
from graphfsdp import CapturedStep, NotCopyableError, Phase, PhaseError
from graphfsdp.optim import FusedAdam, Muon
from helpers import assert_same_state, assert_same_states, snapshot
from make_step import make_step
from ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")


def train(step: CapturedStep, next_batch: Callable[[], tuple[Any, ...]], num_calls: int) -> None:
    for _ in range(num_calls):
        step(*next_batch())


def memory_of(step: CapturedStep) -> list[Callable[[], bool]]:
    """Return what tells of the step's inputs and its graph, by and by, whether they are gone."""
    recording = step._runner._recordings.latest
    if recording is None:
        return []
    found = [StorageWeakRef(t.untyped_storage()).expired for t in recording.inputs.tensors()]
    graph = None if recording.graph is None else weakref.ref(recording.graph)
    return found if graph is None else [*found, lambda: graph() is None]


@pytest.mark.parametrize("ends", ["dropped", "closed"])
@pytest.mark.parametrize("num_calls", [0, 2, 4, 6])
def test_a_step_that_ends_is_freed_at_once_without_the_collector(
    num_calls: int, ends: str, device: torch.device
) -> None:
    step, model, _, next_batch = make_step(device, "gpt", max_grad_norm=1.0)
    gc.disable()
    try:
        train(step, next_batch, num_calls)
        gone = memory_of(step)
        if ends == "closed":
            backend: Any = step._runner._backend
            step.close()
            assert device.type == "cuda" or backend.arena.num_bytes == 0
        else:
            held: list[weakref.ref[Any]] = [
                weakref.ref(each) for each in (step, step._runner, step._runner._engine)
            ]
            del step
            assert [reference() for reference in held] == [None] * len(held)
        assert all(is_gone() for is_gone in gone)
    finally:
        gc.enable()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


class Trainer:
    """Holds its step, which holds the loss function, which is a method of it."""

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss


@pytest.mark.parametrize("num_calls", [0, 2, 4, 6])
@pytest.mark.parametrize("cycle", ["model", "optimizer", "loss function", "in place", "none"])
def test_what_is_trained_and_refers_to_its_step_leaves_no_model_behind(
    cycle: str, num_calls: int, device: torch.device
) -> None:
    held: list[weakref.ref[Any]] = []
    for _ in range(4):
        trainer = Trainer()
        options: dict[str, Any] = {"loss_fn": trainer.loss} if cycle == "loss function" else {}
        step, model, optim, next_batch = make_step(device, optimizer="adamw", **options)
        captured: Any = step
        if cycle in ("in place", "none"):
            step.close()
            captured = graphfsdp.capture_in_place(model, optim, keep="all")
        owners: dict[str, Any] = {"optimizer": optim, "loss function": trainer, "none": Trainer()}
        owners.get(cycle, model).step_of_it = [captured]
        for _ in range(num_calls):
            if captured is step:
                step(*next_batch())
                continue
            optim.zero_grad()
            model(*next_batch()).backward()
            optim.step()
        held += map(weakref.ref, (captured, model, optim, next(model.parameters())))
        held += map(weakref.ref, (step, step._runner))
        del trainer, options, owners, captured, step, model, optim
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.gpu
def test_failed_captures_do_not_pile_up_memory() -> None:
    """As far as torch lets it: the pool of a failed capture goes when its graph does."""
    device = torch.device("cuda")
    calls = {"fail": True}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        if calls["fail"] and torch.cuda.is_current_stream_capturing():
            raise KeyError
        return loss

    step, _, _, next_batch = make_step(device, loss_fn=loss_fn)
    train(step, next_batch, 3)
    reserved = []
    for _ in range(6):
        with pytest.raises(KeyError):
            step(*next_batch())
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[1]
    calls["fail"] = False
    train(step, next_batch, 3)
    assert step.phase is Phase.REPLAY


@pytest.mark.parametrize("num_calls", [2, 6])
def test_copies_of_a_step_are_refused(num_calls: int, device: torch.device) -> None:
    step, _, _, next_batch = make_step(device)
    train(step, next_batch, num_calls)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(graphfsdp.NotCopyableError, match=r"bound to the addresses.*capture"):
            attempt(step)
    train(step, next_batch, 3)


# Whose step the loss function calls, how far that is, and how far the one is that calls it.
NESTED = [
    *(("its own", 0, num_calls, "must not call the step") for num_calls in range(4)),
    *(("another", num_inner, 3, "cannot hold another") for num_inner in (0, 3, 6)),
]


@pytest.mark.parametrize(("whose", "num_inner", "num_calls", "words"), NESTED)
def test_a_step_inside_an_iteration_is_refused(
    whose: str, num_inner: int, num_calls: int, words: str, device: torch.device
) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if inside["on"]:
            (step if whose == "its own" else other)(x)
        loss: Tensor = model(x)
        return loss

    inside = {"on": False}
    other, _, _, next_other = make_step(device)
    train(other, next_other, num_inner)
    step, model, optim, next_batch = make_step(device, loss_fn=loss_fn)
    train(step, next_batch, num_calls)
    inside["on"] = True
    batch = next_batch()
    before = snapshot(model, optim)
    with pytest.raises(graphfsdp.PhaseError, match=words):
        step(*batch)
    assert_same_state(before, snapshot(model, optim))
    inside["on"] = False
    train(step, next_batch, 3)
    train(other, next_other, 2)


def test_a_second_thread_is_refused(device: torch.device) -> None:
    entered, leave = threading.Event(), threading.Event()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        entered.set()
        leave.wait()
        loss: Tensor = model(x)
        return loss

    step, _, _, next_batch = make_step(device, loss_fn=loss_fn)
    first = threading.Thread(target=lambda: train(step, next_batch, 1))
    first.start()
    try:
        entered.wait()
        for use in (lambda: step(*next_batch()), step.close):
            with pytest.raises(
                graphfsdp.PhaseError, match="on one thread while it runs on another"
            ):
                use()
    finally:
        leave.set()
        first.join()
    train(step, next_batch, 4)
    assert step.report().num_calls == {"warmup": 3, "capture": 1, "replay": 1}


def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    step, _, _, next_batch = make_step(torch.device("cpu"))
    train(step, next_batch, 5)
    batch = next_batch()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"nothing was raised"
        try:
            step(*batch)
        except graphfsdp.PhaseError as error:
            answer = str(error).encode()
        finally:
            step.close()
            os.write(writing, answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert "in its forked child" in os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    step(*batch)


def test_closing_changes_nothing_and_eager_training_goes_on_as_if_all_had_been_eager(
    device: torch.device,
) -> None:
    """Captured, closed, by hand, captured again: as if all had been by hand."""

    def run(scope: str) -> list[dict[str, Tensor]]:
        step, model, optim, next_batch = make_step(device, scope=scope)
        train(step, next_batch, 6)
        before = snapshot(model, optim)
        bound = [param.grad for param in model.parameters()]
        step.close()
        assert_same_state(before, snapshot(model, optim))
        assert all(p.grad is g for p, g in zip(model.parameters(), bound, strict=True))
        saved = copy.deepcopy({"model": model.state_dict(), "optim": optim.state_dict()})
        for _ in range(3):
            optim.zero_grad()
            assert all(param.grad is None for param in model.parameters())
            model(*next_batch()).backward()
            assert not any(p.grad is g for p, g in zip(model.parameters(), bound, strict=True))
            optim.step()
        by_hand = snapshot(model, optim)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        with graphfsdp.capture(model, optim, scope=scope) as again:
            train(again, next_batch, 6)
        return [by_hand, snapshot(model, optim)]

    assert_same_states(run("none"), run("full_iteration"))


CALLS_OF_A_THREAD = 9  # of which the fifth captures again in the threads
NUM_ROUNDS = 3


def train_alone(
    device: torch.device, seed: int, scope: str, both: threading.Barrier | None = None
) -> list[Tensor]:
    """Return losses, an evaluation and weights; the threads begin each warm-up at once."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(drawn(*param.shape))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    got = []
    with graphfsdp.capture(
        model,
        optimizer,
        loss_fn=lambda net, x: net(x).square().mean(),
        scope=scope,
        on_change="recapture",
    ) as step:
        for index in range(CALLS_OF_A_THREAD):
            if both is not None and index < 4:
                both.wait()
            got.append(step(drawn(16 if index < 5 else 4, 8)))
        got.append(step.evaluate(drawn(4, 8)))
        assert scope == "none" or step.phase is Phase.REPLAY
    return [*got, *(param.detach().clone() for param in model.parameters())]


def test_two_threads_that_capture_on_one_device_train_as_each_alone(device: torch.device) -> None:
    expected = [train_alone(device, seed, "none") for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(NUM_ROUNDS):
            both = threading.Barrier(2)
            runs = [
                threads.submit(train_alone, device, 1 + n, "full_iteration", both) for n in (0, 1)
            ]
            for run, wanted in zip(runs, expected, strict=True):
                assert all(map(torch.equal, run.result(), wanted))


def test_a_turn_that_does_not_come_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfsdp.base.streams._TURN_LIMIT_S", 0.05)
    model = nn.Linear(8, 1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        other.submit(train_alone, torch.device("cpu"), 1, "full_iteration").result()
        loss: Tensor = model(x).mean()
        return loss

    step = graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn)
    with (
        ThreadPoolExecutor(1) as other,
        pytest.raises(PhaseError, match=r"another thread .* Remedy"),
    ):
        step(torch.ones(4, 8))


Pair = tuple[nn.Module, torch.optim.Optimizer]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> graphfsdp.CapturedStep:
    options: dict[str, Any] = {"loss_fn": mean_square, "warmup_steps": 1, "max_grad_norm": 0.5}
    return graphfsdp.capture(model, optimizer, **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_pair_that_is_being_replayed_is_copied_and_both_train_alike(way: str) -> None:
    """The graph stays with the original; nothing is shared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = capture(model, optim)
    batches = [torch.randn(5, 4) for _ in range(9)]
    for batch in batches[:4]:
        step(batch)
    before = snapshot(model, optim)
    pair: Pair = WAYS[way]((model, optim))
    assert pair[1].param_groups[0]["params"][0] is next(pair[0].parameters())
    other = capture(*pair)
    losses = [other(batch) for batch in batches[4:]]
    assert_same_state(before, snapshot(model, optim), "the original")
    for batch, loss in zip(batches[4:], losses, strict=True):
        assert torch.equal(step(batch), loss)
    assert step.report().num_captures == other.report().num_captures == 1
    after = snapshot(model, optim)
    step.close()
    assert torch.isfinite(other(batches[0]))  # it lives without the original
    assert_same_state(after, snapshot(model, optim), "the original")


@pytest.mark.parametrize("way", WAYS)
def test_our_optimizers_are_not_copied(way: str) -> None:
    params = [nn.Parameter(torch.ones(2, 3))]
    for optim in (FusedAdam(params), Muon(params)):
        with pytest.raises(NotCopyableError, match=r"cannot be pickled .*load_state_dict"):
            WAYS[way](optim)


@on_ranks("ranks2")
def test_the_state_of_a_sharded_run_is_saved_and_copied_by_torch(tmp_path: pathlib.Path) -> None:
    """torch.save on each rank, as people do who keep the world's size."""
    torch.manual_seed(0)
    for make_optim in (FusedAdam, make_muon, partial(torch.optim.AdamW, fused=True)):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
        graphfsdp.fully_shard(model[0])
        graphfsdp.fully_shard(model)
        optim: torch.optim.Optimizer = make_optim(model.parameters(), lr=0.01)
        step = capture(model, optim)
        for _ in range(5):
            step(torch.ones(5, 4))
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        assert_shares_memory(state["model"], model)
        copied = copy.deepcopy(state)
        path = tmp_path / f"{type(optim).__name__}{torch.distributed.get_rank()}.pt"
        torch.save(state, path)
        expected = [step(torch.ones(5, 4)) for _ in range(3)]
        step.close()
        for again in (torch.load(path), copied):  # weights_only, which is torch's default
            model.load_state_dict(again["model"])
            optim.load_state_dict(again["optim"])
            with capture(model, optim) as step:
                for loss in expected:
                    assert torch.equal(step(torch.ones(5, 4)), loss)


def assert_shares_memory(state: dict[str, Any], model: nn.Module) -> None:
    params: dict[str, Any] = dict(model.named_parameters())
    for name, value in state.items():
        assert value.to_local().data_ptr() == params[name].to_local().data_ptr()
        version = params[name]._version
        value.mul_(1.0)
        assert params[name]._version == version + 1, "what was gathered before is old now"
