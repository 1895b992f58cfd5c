"""Batches that are taken ahead: the same ones, the state of those handed out, errors, copies."""

import contextlib
import itertools
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import chosen
from forked_programs import run_source
from graphfsdp.data import Feed
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from time_limits import until


class Numbers:
    """An iterator with a position, which a thread may have moved further than it seems."""

    def __init__(self, *, end: int = 10**9, fails_at: int = -1) -> None:
        self.position = 0
        self._end, self._fails_at = end, fails_at

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> dict[str, Any]:
        if self.position == self._end:
            raise StopIteration
        if self.position == self._fails_at:
            raise OSError("the disk is gone")
        self.position += 1
        return {"x": torch.full((3,), float(self.position)), "name": "a text"}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def values(batches: Iterator[Any], count: int) -> list[float]:
    return [float(next(batches)["x"][0]) for _ in range(count)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_state_is_that_of_the_batch_handed_out_last(ahead: int, device: torch.device) -> None:
    loader = Numbers()
    feed = Feed(loader, device, ahead=ahead)
    assert feed.state_dict() == {"position": 0}
    batches = iter(feed)
    batch = next(batches)
    assert batch["x"].device.type == device.type
    assert batch["name"] == "a text"
    assert values(batches, 4) == [2, 3, 4, 5]
    assert until(lambda: loader.position >= 5 + ahead, 20)
    assert feed.state_dict() == {"position": 5}
    with pytest.raises(ConfigError, match="is being iterated over"):
        feed.load_state_dict({"position": 1})
    batches.close()
    assert loader.position == 5  # what was taken ahead comes again
    assert values(iter(feed), 2) == [6, 7]
    feed.load_state_dict({"position": 40})
    assert feed.state_dict() == {"position": 40}
    assert values(iter(feed), 1) == [41]
    assert feed.waited_s > 0


def test_it_ends_and_fails_where_the_loader_does(device: torch.device) -> None:
    before = threading.active_count()
    assert [float(b["x"][0]) for b in Feed(Numbers(end=3), device)] == [1, 2, 3]
    assert list(Feed(Numbers(end=0), device)) == []
    feed = Feed(Numbers(fails_at=2), device)
    batches = iter(feed)
    assert values(batches, 2) == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert feed.state_dict() == {"position": 2}
    for _ in Feed(Numbers(), device):
        break
    assert threading.active_count() == before


def test_it_says_how_long_it_made_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one each time somebody looks, or the loop computes."""
    seconds = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr("graphfsdp.data.feed.time", clock)
    feed = Feed(Numbers(end=6))
    for _ in feed:
        next(seconds)
    assert feed.waited_s == 6
    with pytest.raises(ConfigError, match="ahead must be at least 1, got 0"):
        Feed(Numbers(), ahead=0)


def test_an_ordinary_loader_begins_anew_each_time(device: torch.device) -> None:
    feed = Feed(DataLoader(torch.arange(6.0), batch_size=2), device)  # type: ignore[arg-type]
    assert len(feed) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in feed] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("scope", ["none", "full_iteration"])
def test_a_captured_loop_trains_on_the_same_batches(scope: str, device: torch.device) -> None:
    """Several kinds of leaves, and more batches in flight than are held."""

    def train(ahead: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).to(device)
        optimizer = FusedAdam(model.parameters(), lr=0.1)
        loader = Numbers(end=12)

        def loss_fn(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            loss: torch.Tensor = (model(batch["x"]) - 1).square().mean()
            return loss

        source: Any = (
            ({"x": batch["x"].to(device), "name": batch["name"]} for batch in loader)
            if ahead is None
            else Feed(loader, device, ahead=ahead)
        )
        with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
            losses = [step(batch) for batch in source]
        return [*losses, *(param.detach() for param in model.parameters())]

    expected = train(None)
    assert len(expected) == 14
    for ahead in (1, 2):
        assert all(map(torch.equal, train(ahead), expected))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_loader_may_fill_the_same_tensor_anew(
    ahead: int, is_pinned: bool, device: torch.device
) -> None:
    buffer = torch.empty(4, pin_memory=is_pinned and device.type == "cuda")
    batches = Feed((buffer.fill_(float(number)) for number in range(12)), device, ahead=ahead)
    assert [batch.tolist() for batch in batches] == [[number] * 4 for number in range(12)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdata_s_loader_resumes_in_the_middle_of_an_epoch(
    num_workers: int, device: torch.device
) -> None:
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Feed:
        generator = torch.Generator().manual_seed(7)
        options = {"batch_size": 4, "shuffle": True, "generator": generator}
        samples = torch.arange(24.0)
        return Feed(StatefulDataLoader(samples, num_workers=num_workers, **options), device)

    whole = [batch.tolist() for batch in make()]
    first = make()
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(2)]
    state = first.state_dict()
    batches.close()
    second = make()
    second.load_state_dict(state)
    assert begun + [batch.tolist() for batch in second] == whole
    assert len(whole) == 6


# In a process of its own, since the time limit of tests has the timer that is the most exact.
INTERRUPTED = """
import contextlib, random, signal, time
from graphfsdp.data import Feed

def interrupt(*_):
    raise InterruptedError

def endless():
    while True:
        time.sleep(2e-4)
        yield 1

signal.signal(signal.SIGALRM, interrupt)
for _ in range(1500):
    batches = iter(Feed(endless(), ahead=2))
    next(batches)
    with contextlib.suppress(InterruptedError):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-4, 2.5e-3))
        for _ in batches:
            pass
    batches.close()  # joins the thread
"""


def test_an_interrupt_at_any_place_lets_it_end() -> None:
    """A handler that raises leaves a lock of Python's own taken, if it comes at the wrong time."""
    done = run_source(INTERRUPTED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["cuda", None])
@pytest.mark.gpu
def test_batches_that_a_loader_makes_on_a_gpu_are_those_of_the_loop_itself(
    target: str | None,
) -> None:
    """On the device and the stream of who iterates; the loader may fill the same memory anew."""
    device = torch.cuda.device_count() - 1

    def loader() -> Iterator[Tensor]:
        batch = torch.zeros(1 << 12, device="cuda")
        for number in range(20):
            yield batch.fill_(number)

    stream = torch.cuda.Stream(device)
    # Above the stand-in nothing runs before something waits for it, as on a busy GPU.
    lazily = chosen(streams=3) if library.is_below() else contextlib.nullcontext()
    with lazily, torch.cuda.device(device), torch.cuda.stream(stream):
        sums = [batch.sum() for batch in Feed(loader(), target)]
        assert {each.device.index for each in sums} == {device}
        assert [float(each) for each in sums] == [number * 4096.0 for number in range(20)]
