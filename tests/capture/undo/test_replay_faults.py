"""A fault at every operator of a warm-up, a capture, a replay: how far it is undone, and then."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from faults_at_operators import FAULTS, Fault, FaultMode, World
from graphfsdp import CapturedStep, Phase
from graphfsdp.optim import FusedAdam
from helpers import (
    Case,
    assert_same_state,
    check_against_eager,
    line_of,
    make_optimizer,
    quick_garbage_collection,
    run,
    set_lr,
    snapshot,
)
from zoo import ZOO, features
from zoo_models import WIDTH, Squared, UnusedParameter

NUM_CALLS = 7
# What may fail, before or after the operator has written; taken in turn over the operators.
WAYS = tuple(itertools.product(Fault, (False, True)))


class Net(nn.Module):
    """Running statistics, dropout, a generator of its own, a Python count, a kept activation."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(WIDTH, 1)
        self.generator = torch.Generator().manual_seed(5)
        self.counts = counts
        self.num_calls = 0
        self.draws = True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.num_calls += 1
        if self.draws:  # which a recording refuses
            random.random(), numpy.random.rand()
        noise = torch.rand(x.shape, generator=self.generator)
        hidden: Tensor = self.drop(torch.tanh(self.norm(self.first(x + noise))))
        self.kept = hidden.detach()
        loss: Tensor = self.last(hidden).square().mean()
        return loss


def fused(params: Any) -> torch.optim.Optimizer:
    return FusedAdam(params, lr=1e-2, weight_decay=0.1, skip_nonfinite=True, max_grad_norm=0.5)


def adamw(params: Any) -> torch.optim.Optimizer:
    return make_optimizer("adamw", params, torch.device("cpu"))


def tiny() -> nn.Module:
    """Return what is little enough that every operator of its recording can fail."""
    return Squared(
        nn.Linear(WIDTH, 1, bias=False), nn.BatchNorm1d(1, affine=False), nn.Dropout(0.5)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], dict[str, Any]]] = {
    "tiny": (tiny, FusedAdam, {}),
    "fused": (Net, fused, {}),
    "adamw_clip": (lambda: Net(counts=False), adamw, {"max_grad_norm": 0.1}),
    "microbatches": (UnusedParameter, fused, {"microbatches": 2}),
    "eager_optimizer": (UnusedParameter, adamw, {"scope": "forward_backward"}),
}


class Training:
    """A model in training, and how it would go without faults."""

    def __init__(self, name: str, **options: Any) -> None:
        quick_garbage_collection()
        make_model, make_optim, case_options = CASES[name]
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.model = make_model()
        self.optim = make_optim(self.model.parameters())
        self.options = {"warmup_steps": 2, **case_options, **options}
        self.step: CapturedStep = graphfsdp.capture(self.model, self.optim, **self.options)
        # A gradient from before, which the first call takes off.
        for param in self.model.parameters():
            param.grad = torch.full_like(param, 7.0) if param.requires_grad else None

    def batch(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        set_lr(self.optim, 0.02 / (1 + index))
        vars(self.model)["draws"] = index < 2
        return torch.randn(4, WIDTH, generator=generator)

    def generators(self) -> list[torch.Generator]:
        return [self.model.generator] if isinstance(self.model, Net) else []

    def world(self) -> World:
        return World(self.model, self.optim, self.generators())


def expected(name: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and states of a run without faults or graphs."""
    training = Training(name, scope="none")
    found = []
    for index in range(NUM_CALLS):
        loss = training.step(training.batch(index))
        found.append((loss, without_kept(snapshot(training.model, training.optim))))
    return found


def without_kept(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "attribute .kept"}


def fail_everywhere(training: Training, index: int, stride: int) -> tuple[Tensor, int]:
    """Call the step, every time with a fault at the next operator, until none is left.

    Until then the state must not change. Returns what the call without a fault has returned, and
    the number of faults.
    """
    batch = training.batch(index)
    world, phase = training.world(), training.step.phase
    for count in itertools.count():
        position = index % stride + count * stride
        fault, after = WAYS[(count + index) % len(WAYS)]
        quick_garbage_collection()
        mode = FaultMode(position, fault, after=after)
        calls = training.step.report().num_calls
        try:
            with mode:
                loss = training.step(batch)
        except FAULTS:
            when = f"call {index}, {fault.value} {'after' if after else 'in'} {mode.fired}"
            world.assert_unchanged(f"{when} at {position}")
            assert training.step.phase is phase, when
            assert training.step.report().num_calls == calls, when
        else:
            assert mode.fired is None, f"{mode.fired} failed and nobody heard of it"
            return loss, count
    raise AssertionError


def fail_replay_everywhere(training: Training, index: int) -> int:
    """Replay with a fault at every operator, until one breaks the step or is not in the replay.

    Returns:
        How many were undone.
    """
    batch = training.batch(index)
    world = training.world()
    for position in itertools.count():
        fault = (Fault.ERROR, Fault.OUT_OF_MEMORY)[position % 2]
        mode = FaultMode(position, fault, after=position % 3 == 0)
        with pytest.raises(FAULTS) as caught, mode:
            training.step(batch)
        if mode.num_ops <= 2:
            continue  # the batch was still being copied in
        if not hasattr(caught.value, "__notes__"):
            return position  # in the optimizer, which is no part of the replay
        if training.step.phase is Phase.BROKEN:
            assert "stopped while it updated weights" in caught.value.__notes__[-1]
            return position
        when = f"replay, {fault.value} in {mode.fired} at {position}"
        assert "was undone" in caught.value.__notes__[-1], when
        world.assert_unchanged(when, without_gradients=True)
        assert all(param.grad is None for param in training.model.parameters()), when
    raise AssertionError


@pytest.mark.parametrize("name", ["fused", "adamw_clip", "microbatches", "eager_optimizer"])
def test_a_replay_is_undone_up_to_the_optimizer_and_refused_after_it(name: str) -> None:
    """The last operators write weights; after these a checkpoint is needed."""
    reference = expected(name)
    training = Training(name)
    for index in range(4):
        training.step(training.batch(index))
    counting = FaultMode(-1, Fault.ERROR, after=False)
    with counting:
        training.step(training.batch(4))
    model, optimizer = copy.deepcopy((training.model.state_dict(), training.optim.state_dict()))
    generators = [torch.default_generator, *training.generators()]
    drawn = [generator.get_state() for generator in generators]
    num_undone = fail_replay_everywhere(training, 5)
    if name == "eager_optimizer":
        assert num_undone > 15
        assert training.step.phase is Phase.REPLAY
        return
    too_late = "more than the optimizer step could not be undone"
    assert num_undone >= counting.num_ops - 12, too_late
    with pytest.raises(graphfsdp.PhaseError, match=r"broken: .*load model and optimizer"):
        training.step(training.batch(5))
    training.step.close()
    training.model.load_state_dict(model)
    training.optim.load_state_dict(optimizer)
    for generator, state in zip(generators, drawn, strict=True):
        generator.set_state(state)
    training.step = graphfsdp.capture(training.model, training.optim, **training.options)
    for index in (5, 6):
        assert torch.equal(training.step(training.batch(index)), reference[index][0])


@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_operator_of_warm_up_and_capture_leaves_no_trace(name: str) -> None:
    reference = expected(name)
    training = Training(name)
    num_faults = []
    for index, (loss, state) in enumerate(reference):
        if index <= 2:  # two warm-ups and the capture
            # Of the larger models, whose recordings take longer, a part.
            stride = 1 if name == "tiny" else (7, 7, 11)[index]
            got, count = fail_everywhere(training, index, stride)
            num_faults.append(count)
        else:
            got = training.step(training.batch(index))
        assert torch.equal(got, loss), index
        now = without_kept(snapshot(training.model, training.optim))
        assert_same_state(state, now, f"call {index}")
    assert min(num_faults) >= 8, num_faults
    assert training.step.report().num_captures == 1
    training.step.close()


def make(
    device: torch.device, switch: dict[str, bool], undo: str
) -> tuple[CapturedStep, nn.Module, FusedAdam]:
    torch.manual_seed(0)
    model = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, WIDTH)).to(device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        if switch["on"]:
            raise ValueError("a mistake")
        return loss

    optimizer = FusedAdam(model.parameters(), lr=0.01)
    return graphfsdp.capture(model, optimizer, loss_fn=loss_fn, undo=undo), model, optimizer


def test_training_is_the_same_without_copies(device: torch.device) -> None:
    check_against_eager(ZOO["mlp"], device, undo="none")


def test_a_warm_up_that_fails_breaks_the_step(device: torch.device) -> None:
    switch = {"on": False}
    step, _, _ = make(device, switch, "none")
    x = torch.randn(6, WIDTH, device=device)
    step(x)
    switch["on"] = True
    with pytest.raises(ValueError, match="a mistake"):
        step(x)
    assert step.phase is Phase.BROKEN
    switch["on"] = False
    with pytest.raises(graphfsdp.PhaseError, match="undo='none'"):
        step(x)
    step.close()


def test_a_capture_that_fails_leaves_no_trace_all_the_same(device: torch.device) -> None:
    """On a GPU nothing of it has run; on a CPU copies are kept for this one iteration."""
    switch = {"on": False}
    step, model, optimizer = make(device, switch, "none")
    for _ in range(3):
        step(torch.randn(6, WIDTH, device=device))
    x = torch.randn(6, WIDTH, device=device)
    before = snapshot(model, optimizer)
    switch["on"] = True
    with pytest.raises(ValueError, match="a mistake"):
        step(x)
    switch["on"] = False
    assert_same_state(before, snapshot(model, optimizer))
    for _ in range(3):
        step(torch.randn(6, WIDTH, device=device))
    assert step.phase is Phase.REPLAY
    step.close()


@pytest.mark.gpu
def test_copies_that_the_machine_has_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the system would kill the process for them."""
    path = "graphfsdp._capture.cuda.host_copies.available_bytes"
    monkeypatch.setattr(path, lambda: 1000)
    step, model, optimizer = make(torch.device("cuda"), {"on": False}, "auto")
    x = torch.randn(6, WIDTH, device="cuda")
    before = snapshot(model, optimizer)
    with pytest.raises(graphfsdp.CaptureError, match=r"memory of the host.*undo='none'"):
        step(x)
    assert_same_state(before, snapshot(model, optimizer))
    step.close()
    step, _, _ = make(torch.device("cuda"), {"on": False}, "none")
    for _ in range(6):
        step(x)
    assert step.phase is Phase.REPLAY
    step.close()


class Spiking(nn.Module):
    """Its potential begins as a number, as those of spiking nets do when they are reset."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.potential: float | Tensor = 0.0

    def forward(self, x: Tensor) -> Tensor:  # its forward
        spikes = torch.zeros_like(x)
        for _ in range(3):
            potential = self.potential * 0.5 + self.layer(x)
            spike = torch.sigmoid(potential - 1)
            self.potential = potential - spike.detach()
            spikes = spikes + spike
        return spikes.square().mean()


def rest(model: nn.Module) -> None:
    model.potential = 0.0  # type: ignore[assignment]


def from_rest(model: nn.Module, x: Tensor) -> Tensor:
    rest(model)
    loss: Tensor = model(x)
    return loss


def test_a_number_that_becomes_a_tensor_is_refused_and_a_reset_at_the_beginning_captured() -> None:
    def resets(model: nn.Module, optimizer: object) -> Callable[[], object]:
        return lambda: rest(model)

    behind = Case(Spiking, features(4), setup=resets)
    with pytest.raises(graphfsdp.CaptureError, match=r"'potential', which was 0\.0") as caught:
        run(behind, "full_iteration", torch.device("cpu"))
    assert "beginning of the iteration" in str(caught.value)
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(Spiking, "# its forward")
    at_first = Case(Spiking, features(4), from_rest, setup=lambda model, optimizer: None)
    expected, got = (
        run(behind, "none", torch.device("cpu")),
        run(at_first, "full_iteration", torch.device("cpu")),
    )
    assert got.report.num_calls["replay"] == 10
    for (one,), (other,) in zip(expected.outputs, got.outputs, strict=True):
        assert torch.equal(one, other)
    assert isinstance(got.snapshots[-1]["attribute .potential"], Tensor)
