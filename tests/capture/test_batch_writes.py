"""An iteration that writes into its batch: tensors as a loop leaves them, containers refused."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import PlainStep, same_bits
from iterations import steps_once
from parts_helpers import check

NUM_CALLS = 14  # 3 warm-up, 1 capture, 10 replays
Loss = Callable[..., Any]
Given = Callable[[Tensor], tuple[Any, ...]]


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4))


def step_over(device: torch.device, loss_fn: Loss, **options: Any) -> graphfsdp.CapturedStep:
    model = make_model().to(device)
    return graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn, **options)


def inputs(device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(6, 4, generator=generator).to(device) for _ in range(NUM_CALLS))


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.ones(6, 4, device=device)


@dataclass
class Batch:
    power: int = 2


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def plain(model: nn.Module, x: Tensor, *others: object) -> Tensor:
    return mean_square(model(x))


def carries(model: nn.Module, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    y: Tensor = model(x + state["h"])
    state["h"] = (0.5 * state["h"] + y).detach()
    return mean_square(y)


def carries_in_place(model: nn.Module, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    y: Tensor = model(x + state["h"])
    with torch.no_grad():
        state["h"].mul_(0.5).add_(y)
    return mean_square(y)


def masks(model: nn.Module, x: Tensor) -> Tensor:
    x[x > 1] = 0.5
    x[:, 0].clamp_(-1, 1)
    return mean_square(model(x) - x)


def forces(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    energy = model(x).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    loss: Tensor = mean_square(force) + energy.square()
    return loss


def gates(model: Any, x: Tensor) -> Tensor:
    x *= model[0].weight[0]  # which puts the input into the autograd graph
    return mean_square(model(x))


class Program(NamedTuple):
    """A loss function, its batch of each call, and what all calls are given behind that."""

    loss_fn: Loss
    batch: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,)
    kept: Callable[[Tensor], tuple[Any, ...]] = lambda zeros: ()


PROGRAMS = {
    "a tensor that carries a state": Program(carries_in_place, kept=lambda zeros: ({"h": zeros},)),
    "a mask": Program(masks, lambda x: (x.repeat(2, 1)[:6],)),  # a view of what is larger
    "gradients of an input": Program(forces),
    "an input in the autograd graph": Program(gates),
}


def trained(program: Program, device: torch.device, scope: str, **options: Any) -> list[Tensor]:
    """Return losses, what is in each batch behind its call, and weights."""
    model = make_model().to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    options["loss_fn"] = program.loss_fn
    step: Any = (
        PlainStep(model, optimizer, **options)
        if scope == "plain"
        else graphfsdp.capture(model, optimizer, scope=scope, **options)
    )
    kept = program.kept(torch.zeros(6, 4, device=device))
    seen = []
    for x in inputs(device):
        batch = (*program.batch(x), *kept)
        seen += [step(*batch).clone(), *(leaf.clone() for leaf in pytree.tree_leaves(batch))]
    if scope == "full_iteration":
        assert step.report().num_calls["replay"] >= 10
    return [*seen, *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_batch_behind_a_call_is_as_a_loop_without_a_graph_leaves_it(
    name: str, device: torch.device
) -> None:
    """Also behind that of an iteration of one's own."""
    program = PROGRAMS[name]
    expected = trained(program, device, "plain")
    own: dict[str, Any] = {"iteration": steps_once(program.loss_fn)}
    for scope, options in (("none", {}), ("full_iteration", {}), ("full_iteration", own)):
        got = trained(program, device, scope, **options)
        assert all(same_bits(one, other) for one, other in zip(expected, got, strict=True))


def test_tensors_of_microbatches_are_written(device: torch.device) -> None:
    def doubles(model: nn.Module, x: Tensor) -> Tensor:
        return plain(model, x.mul_(2))

    with step_over(device, doubles, microbatches=2) as step:
        for each in inputs(device):
            twice = 2 * each
            step(each)
            assert same_bits(each, twice)


def pops(model: nn.Module, x: Tensor, batch: Any) -> Tensor:
    return mean_square(model(x) - batch.pop("y"))


def appends_a_loss(model: nn.Module, x: Tensor, losses: list[Tensor]) -> Tensor:
    losses.append(plain(model, x))
    return losses[-1]


def squares(model: nn.Module, x: Tensor, batch: Batch) -> Tensor:
    batch.power += 1
    return plain(model, x)


def gives_a_view(x: Tensor) -> tuple[Any, ...]:
    state = {"h": torch.zeros_like(x)}
    return state, state["h"][0]


INTO_IT = r"writes into args\[1\] of its batch.*a container of the iteration's own"
# Loss function, what it is given, and what the first call says.
REFUSED: dict[str, tuple[Loss, Given, str]] = {
    "a state under a key": (carries, lambda x: ({"h": torch.zeros_like(x)},), INTO_IT),
    "a key that is taken out": (pops, lambda x: ({"x": x, "y": x},), INTO_IT),
    "a list that grows": (appends_a_loss, lambda x: ([],), INTO_IT),
    "an attribute": (squares, lambda x: (Batch(),), INTO_IT),
    "a tensor and a view of it": (
        lambda model, x, state, _: carries_in_place(model, x, state),
        gives_a_view,
        r"writes into args\[1\].*pass it once",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_replay_can_write_is_refused_in_the_first_call(
    name: str, device: torch.device, x: Tensor
) -> None:
    loss_fn, given, message = REFUSED[name]
    with pytest.raises(graphfsdp.CaptureError, match=message) as caught:
        step_over(device, loss_fn)(x, *given(x))
    assert "Remedy: " in str(caught.value)


def test_a_container_of_the_iterations_own_may_be_written(device: torch.device) -> None:
    with step_over(device, lambda model, x, batch: pops(model, x, dict(batch))) as step:
        for x in inputs(device):
            step(x, {"x": x, "y": x})
        assert step.report().num_calls["replay"] == 10


@pytest.mark.parametrize("returns", [lambda y: mean_square(y), lambda y: (mean_square(y), y)])
def test_no_batch_outlives_its_call(returns: Callable[[Tensor], Any], device: torch.device) -> None:
    step = step_over(device, lambda model, x: returns(model(x)))
    for call in (step, step.evaluate) * 6:
        x = torch.ones(6, 4, device=device)
        held = weakref.ref(x)
        call(x)
        del x
        assert held() is None


def test_a_call_that_fails_and_an_example_leave_the_batch_as_it_was(
    device: torch.device, x: Tensor
) -> None:
    def fails(model: nn.Module, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        loss = carries_in_place(model, x.mul_(2), state)
        if raises["now"]:
            raise KeyError("of the user's")
        return loss

    state = {"h": torch.zeros_like(x)}
    for raises in ({"now": False}, {"now": True}):
        if raises["now"]:
            step = step_over(device, fails)
            with pytest.raises(KeyError):
                step(x, state)
        else:
            step_over(device, fails, example_batch=(x, state))
        assert same_bits(x, torch.ones_like(x))
        assert same_bits(state["h"], torch.zeros_like(x))


class Whole(nn.Module):
    """Hands a net what it is given."""

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.net = make_model()
        self.what = what

    def forward(self, x: Tensor, others: Any) -> Any:
        return self.what(self.net, x, others)


def appends(net: nn.Module, x: Tensor, others: list[Tensor]) -> Tensor:
    y: Tensor = net(x)
    others.append(y.mean())
    return y


def asks_for_gradients(net: nn.Module, x: Tensor, others: None) -> Any:
    return net(x.requires_grad_(True))


@pytest.mark.parametrize(
    ("what", "others_of", "why"),
    [
        (appends, lambda x: [], "writes into a container"),
        (asks_for_gradients, lambda x: None, "changes requires_grad of an input"),
    ],
)
def test_a_part_that_writes_into_what_it_is_given_runs_as_written(
    what: Callable[..., Any], others_of: Callable[..., Any], why: str, device: torch.device
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for x in inputs(device):
            others = others_of(x)
            y = model(x, others)
            optimizer.zero_grad()
            if x.requires_grad:
                yield from torch.autograd.grad(y.sum(), x, retain_graph=True)
            mean_square(y).backward()
            optimizer.step()
            yield from (y, *(others or ()))

    assert why in str(check(loop, lambda: Whole(what).to(device)).report())
