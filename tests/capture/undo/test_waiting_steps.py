"""Fused steps wait until the rest of a warm-up or a capture stands, and nobody can tell."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from faults import InjectedError, World
from graphfsdp import Phase, PhaseError
from graphfsdp._capture.undo import copy_on_write, undo_arena
from graphfsdp._capture.undo.held_back import FUSED_STEPS
from graphfsdp._capture.undo.undo_arena import UndoArena
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, check_against_eager, make_optimizer, snapshot

WIDTH = 512  # 256 KiB of weights a layer, and little else in an iteration


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def batch(index: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had as much memory now as ever, and copies had to be small."""
    monkeypatch.setattr(copy_on_write, "_FREE_BYTES", -1)
    monkeypatch.setattr(copy_on_write, "resident_bytes", lambda: 1 << 40)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were copied so that they can be undone."""
    found: list[int] = []
    take = UndoArena.take

    def counted(self: UndoArena, num_bytes: int) -> Tensor:
        piece = take(self, num_bytes)
        found.append(piece.nbytes)
        return piece

    monkeypatch.setattr(UndoArena, "take", counted)
    return found


class StepFault(TorchDispatchMode):
    """Lets the n-th fused step fail, or a signal arrive while it runs."""

    def __init__(self, index: int, fail: Callable[[], None], *, after: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._fail = fail
        self._after = after
        self.num_steps = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in FUSED_STEPS:
            return func(*args, **(kwargs or {}))
        self.num_steps += 1
        fires = self.num_steps == self._index + 1
        if fires and not self._after:
            self._fail()
        result = func(*args, **(kwargs or {}))
        if fires and self._after:
            self._fail()
        return result


def raise_error() -> None:
    raise InjectedError("on purpose")


def send_interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw", "sgd"])
@pytest.mark.parametrize("scope", ["full_iteration", "forward_backward"])
def test_training_is_bit_for_bit_the_eager_one_with_room_for_copies_or_without(
    optimizer: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8)),
        lambda generator: Batch((torch.randn(4, 8, generator=generator),)),
        loss_of,
    )
    check_against_eager(case, torch.device("cpu"), scope=scope, optimizer=optimizer)
    monkeypatch.setattr(copy_on_write, "_FREE_BYTES", -1)
    monkeypatch.setattr(copy_on_write, "resident_bytes", lambda: 1 << 40)
    check_against_eager(case, torch.device("cpu"), scope=scope, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw"])
def test_weights_and_state_are_not_copied_where_that_raised_the_peak(
    no_room: None, copied: list[int], optimizer: str
) -> None:
    model = large()
    num_bytes = sum(param.nbytes for param in model.parameters())
    optim = make_optimizer(optimizer, model.parameters(), torch.device("cpu"))
    with graphfsdp.capture(model, optim, loss_fn=loss_of, max_grad_norm=1.0) as step:
        per_call = []
        for index in range(4):
            copied.clear()
            step(batch(index))
            per_call.append(sum(copied))
        assert step.report().num_captures == 1
    # In the first call nobody has seen the gradients' memory; but a foreign optimizer may refuse.
    assert per_call[0] == 0 or optimizer == "adamw"
    # Later ones copy gradients, which the user sees until they are overwritten.
    assert all(num_bytes <= num < 1.2 * num_bytes for num in per_call[1:]), per_call


def test_they_are_copied_where_the_iteration_has_left_room(
    monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    model = large()
    num_bytes = sum(param.nbytes for param in model.parameters())
    optim = FusedAdam(model.parameters())
    sizes = iter([1 << 40, *([0] * 1000)])  # much at the first look, nothing any more later
    with graphfsdp.capture(model, optim, loss_fn=loss_of) as step:
        step(batch())
        monkeypatch.setattr(copy_on_write, "resident_bytes", lambda: next(sizes))
        copied.clear()
        step(batch())
    assert sum(copied) >= 4 * num_bytes


@pytest.mark.parametrize("index", [1, 3], ids=["warm_up", "capture"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fail", [raise_error, send_interrupt])
def test_a_step_that_fails_is_undone_where_there_was_room(
    index: int, after: bool, fail: Callable[[], None]
) -> None:
    model = nn.Linear(8, 8)
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=loss_of) as step:
        for position in range(index):
            step(torch.randn(2, 8, generator=torch.Generator().manual_seed(position)))
        phase, world = step.phase, World(model, optim)
        with pytest.raises((InjectedError, KeyboardInterrupt)), StepFault(0, fail, after=after):
            step(torch.ones(2, 8))
        world.assert_unchanged("a fused step")
        assert step.phase is phase
        assert sum(step.report().num_calls.values()) == index
        for _ in range(4):
            step(torch.ones(2, 8))
        assert step.phase is Phase.REPLAY


@pytest.mark.parametrize("index", [1, 3], ids=["warm_up", "capture"])
def test_a_step_that_fails_without_room_breaks_the_captured_step_and_says_so(
    no_room: None, index: int
) -> None:
    model = large()
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=loss_of) as step:
        for position in range(index):
            step(batch(position))
        with pytest.raises(InjectedError), StepFault(0, raise_error):
            step(batch())
        assert step.phase is Phase.BROKEN
        with pytest.raises(PhaseError, match=r"optimizer's step.*checkpoint.*undo_replays=True"):
            step(batch())


def test_without_memory_for_the_step_itself_it_does_not_begin(
    no_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large()
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=loss_of) as step:
        step(batch())
        world = World(model, optim)
        with monkeypatch.context() as patch:
            ask = undo_arena.refuse_without_memory
            patch.setattr(copy_on_write, "refuse_without_memory", lambda _: ask(1 << 60))
            with pytest.raises(RuntimeError, match="memory"):
                step(batch())
        world.assert_unchanged("no memory")
        for _ in range(4):
            step(batch())
        assert step.phase is Phase.REPLAY


@pytest.mark.parametrize("index", [1, 3], ids=["warm_up", "capture"])
def test_with_undo_replays_it_is_undone_though_there_is_no_room(no_room: None, index: int) -> None:
    model = large()
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=loss_of, undo_replays=True) as step:
        for position in range(index):
            step(batch(position))
        world = World(model, optim)
        with pytest.raises(InjectedError), StepFault(0, raise_error, after=True):
            step(batch())
        world.assert_unchanged("undo_replays=True")
        assert step.phase is not Phase.BROKEN


@pytest.mark.parametrize("index", [1, 3], ids=["warm_up", "capture"])
def test_ctrl_c_in_a_step_without_room_comes_when_the_iteration_is_whole(
    no_room: None, index: int
) -> None:
    states = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = large()
        optim = FusedAdam(model.parameters())
        with graphfsdp.capture(model, optim, loss_fn=loss_of) as step:
            for position in range(index):
                step(batch(position))
            if interrupted:
                with pytest.raises(KeyboardInterrupt), StepFault(0, send_interrupt):
                    step(batch(7))
            else:
                step(batch(7))
            assert step.report().num_calls.get("capture", 0) == (index == 3)
            for position in range(8):
                step(batch(position))
            assert step.phase is Phase.REPLAY
            states.append(snapshot(model, optim))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


class Looking:
    """Looks at a weight's memory, below all operators."""

    def __init__(self, model: nn.Linear) -> None:
        self.memory = model.weight.data
        self.seen: list[Any] = []

    def look(self, *_: object) -> None:
        self.seen.append(self.now())

    def now(self) -> Any:
        return self.memory.numpy().tolist()


def hooked(optim: torch.optim.Optimizer, looking: Looking) -> None:
    optim.register_step_post_hook(looking.look)


def replaced(optim: torch.optim.Optimizer, looking: Looking) -> None:
    inner = optim.step

    def step(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        looking.look()
        return found

    optim.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("install", [hooked, replaced])
def test_hooks_and_steps_of_the_user_find_the_weights_stepped(
    install: Callable[[torch.optim.Optimizer, Looking], None],
) -> None:
    model = nn.Linear(4, 4)
    optim = FusedAdam(model.parameters(), lr=0.1)
    looking = Looking(model)
    install(optim, looking)
    with graphfsdp.capture(model, optim, loss_fn=loss_of, scope="forward_backward") as step:
        for index in range(6):
            step(torch.ones(2, 4))
            assert looking.seen[-1] == looking.now(), index


def test_a_user_who_reads_memory_behind_his_own_step_finds_it_stepped() -> None:
    model = nn.Linear(4, 4)
    optim = FusedAdam(model.parameters(), lr=0.1)
    looking = Looking(model)

    def iteration(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optim.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optim.step()
        looking.look()
        return loss

    with graphfsdp.capture(model, optim, iteration=iteration) as step:
        for _ in range(3):
            step(torch.ones(2, 4))
            assert looking.seen[-1] == looking.now()
