"""An iteration that writes into its batch: the caller sees what a loop without a graph leaves."""

import copy
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import PlainStep, same_bits
from iterations import steps_once

NUM_CALLS = 14  # 3 warm-up, 1 capture, 10 replays
Loss = Callable[..., Tensor]
Batches = Callable[[torch.device], Iterator[tuple[Any, ...]]]


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4)).to(device)


def inputs(device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_CALLS):
        yield torch.randn(6, 4, generator=generator).to(device)


def leaves_of(value: Any) -> list[Tensor]:
    """Return copies of all tensors in containers, dataclasses included."""
    if isinstance(value, Batch | Frozen):
        value = vars(value)
    found = pytree.tree_leaves(value)
    inside = [leaves_of(each) for each in found if isinstance(each, Batch | Frozen)]
    own = [each.detach().clone() for each in found if isinstance(each, Tensor)]
    return own + [tensor for each in inside for tensor in each]


def trained(
    loss_fn: Loss, batches: Batches, device: torch.device, how: str, **options: Any
) -> tuple[list[Tensor], list[Any]]:
    """Return losses, weights and what is in each batch behind its call; and the batches."""
    model = make_model(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    step: Any = PlainStep(model, optimizer, loss_fn=loss_fn)
    if how != "plain":
        step = graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=how, **options)
    seen, kept = [], []
    for batch in batches(device):
        seen += [step(*batch).clone(), *leaves_of(list(batch))]
        kept.append(batch)
    if how == "full_iteration":
        assert step.report().num_calls["replay"] >= 10
    return [*seen, *(param.detach() for param in model.parameters())], kept


def check(loss_fn: Loss, batches: Batches, device: torch.device) -> None:
    expected, batches_before = trained(loss_fn, batches, device, "plain")
    own: dict[str, Any] = {"iteration": steps_once(loss_fn)}
    for how, options in (("none", {}), ("full_iteration", {}), ("full_iteration", own)):
        got, batches_now = trained(loss_fn, batches, device, how, **options)
        assert len(expected) == len(got)
        assert all(same_bits(one, other) for one, other in zip(expected, got, strict=True))
        for one, other in zip(batches_before, batches_now, strict=True):
            assert pytree.tree_structure(one) == pytree.tree_structure(other)


@dataclass
class Batch:
    x: Tensor
    state: Any = None
    notes: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    states: dict[str, Tensor]
    power: int = 2


class Rows(MutableMapping[str, Any]):
    """As a TensorDict: known to pytree, iterates over its rows, and refuses ``in``."""

    def __init__(self, **values: Any) -> None:
        self.values_by_key = values

    def __getitem__(self, key: str) -> Any:
        return self.values_by_key[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.values_by_key[key] = value

    def __delitem__(self, key: str) -> None:
        del self.values_by_key[key]

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.values_by_key.values(), strict=True)

    def __len__(self) -> int:
        return 6

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError

    def keys(self) -> Any:
        return self.values_by_key.keys()


pytree.register_pytree_node(
    Rows,
    lambda rows: (list(rows.values_by_key.values()), list(rows.keys())),
    lambda values, keys: Rows(**dict(zip(keys, values, strict=True))),
    flatten_with_keys_fn=lambda rows: (
        [(pytree.MappingKey(key), value) for key, value in rows.values_by_key.items()],
        list(rows.keys()),
    ),
)


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def carried(device: torch.device) -> Iterator[tuple[Any, ...]]:
    state = {"h": torch.zeros(6, 4, device=device), "name": "state"}
    for x in inputs(device):
        yield x, state


def carries(model: nn.Module, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    y: Tensor = model(x + state["h"])
    state["h"] = (0.5 * state["h"] + y).detach()
    return mean_square(y)


def carries_in_place(model: nn.Module, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    y: Tensor = model(x + state["h"])
    with torch.no_grad():
        state["h"].mul_(0.5).add_(y)
    return mean_square(y)


def collected(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in inputs(device):
        yield x, [], deque([x.mean()]), defaultdict(list)


def collects(model: nn.Module, x: Tensor, auxiliary: Any, last: Any, by_name: Any) -> Tensor:
    y: Tensor = model(x)
    auxiliary.append(y.mean())
    auxiliary.append({"norm": y.norm(), "x": x})
    last.appendleft(y.std())
    last.pop()
    by_name["a"].append(y.sum())
    loss: Tensor = mean_square(y) + auxiliary[0]
    return loss


def logged(device: torch.device) -> Iterator[tuple[Any, ...]]:
    log: dict[str, Any] = {}
    for x in inputs(device):
        yield {"x": x}, log


def logs(model: nn.Module, batch: dict[str, Tensor], log: dict[str, Any]) -> Tensor:
    y: Tensor = model(batch["x"])
    log["mean"], log["parts"] = y.mean(), (y.min(), [y.max()])
    return mean_square(y)


def rearranged(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in inputs(device):
        yield {"x": x, "y": x.flip(0)}, [OrderedDict(a=x + 2, b=x + 1), {}]


def rearranges(model: nn.Module, batch: dict[str, Any], others: list[Any]) -> Tensor:
    target = batch.pop("y")
    batch["x"], batch["old"] = batch["x"] * 2, batch["x"]
    others[1]["moved"] = others[0]
    del others[0]
    others[0]["moved"]["c"] = target.mean()
    del others[0]["moved"]["a"]
    return mean_square(model(batch["x"]) - target)


def masked(device: torch.device) -> Iterator[tuple[Any, ...]]:
    whole = torch.stack(list(inputs(device)))
    for x in whole:  # views: what is written lies in the whole
        yield (x,)
    yield (whole[0],)


def masks(model: nn.Module, x: Tensor) -> Tensor:
    x[x > 1] = 0.5
    x[:, 0].clamp_(-1, 1)
    return mean_square(model(x) - x)


def in_dataclasses(device: torch.device) -> Iterator[tuple[Any, ...]]:
    kept = Batch(torch.zeros(6, 4, device=device), notes=[])
    for x in inputs(device):
        yield Batch(x, state=Frozen(x + 1, {"h": x})), kept


def writes_dataclasses(model: nn.Module, batch: Batch, kept: Batch) -> Tensor:
    y: Tensor = model(batch.x + kept.x) + batch.state.x**batch.state.power
    kept.x = (0.5 * kept.x + y).detach()
    batch.state.states["h"] = y
    batch.notes.append(y.mean())
    return mean_square(y)


def in_rows(device: torch.device) -> Iterator[tuple[Any, ...]]:
    kept = Rows(h=torch.zeros(6, 4, device=device))
    for x in inputs(device):
        yield Rows(x=x, inside=Rows(y=x + 1)), kept


def writes_rows(model: nn.Module, batch: Rows, kept: Rows) -> Tensor:
    batch["out"] = model(batch["x"] + kept["h"])
    batch["inside"]["y"] = batch["inside"]["y"] - batch["out"]
    kept["h"] = batch["out"].detach() * 0.5
    del batch["x"]
    return mean_square(batch["inside"]["y"])


def asked_for_gradients(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in inputs(device):
        yield (x,)


def forces(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    energy = model(x).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    loss: Tensor = mean_square(force) + energy.square()
    return loss


def gates(model: Any, x: Tensor) -> Tensor:
    x *= model[0].weight[0]  # which puts the input into the autograd graph
    return mean_square(model(x))


PROGRAMS: dict[str, tuple[Loss, Batches]] = {
    "a dict that carries a state": (carries, carried),
    "a tensor that carries a state": (carries_in_place, carried),
    "lists and deques": (collects, collected),
    "a dict for the log": (logs, logged),
    "containers that are rearranged": (rearranges, rearranged),
    "a mask": (masks, masked),
    "dataclasses": (writes_dataclasses, in_dataclasses),
    "a mapping that libraries register": (writes_rows, in_rows),
    "gradients of an input": (forces, asked_for_gradients),
    "an input in the autograd graph": (gates, asked_for_gradients),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_batch_behind_a_call_is_as_a_loop_without_a_graph_leaves_it(
    name: str, device: torch.device
) -> None:
    """Also behind that of an iteration of one's own."""
    check(*PROGRAMS[name], device)


def test_tensors_of_microbatches_are_written_and_containers_refused(device: torch.device) -> None:
    def doubles(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(2)
        return mean_square(model(x))

    model = make_model(device)
    with graphfsdp.capture(
        model, FusedAdam(model.parameters()), loss_fn=doubles, microbatches=2
    ) as step:
        for x in inputs(device):
            twice = 2 * x
            step(x)
            assert same_bits(x, twice)
    with pytest.raises(graphfsdp.CaptureError, match=r"args\[1\]\[0\].*microbatch.*microbatches=1"):
        step_over(device, collects_one, microbatches=2)(torch.ones(6, 4, device=device), [])
    step_over(device, collects_one)(torch.ones(6, 4, device=device), [])


def collects_one(model: nn.Module, x: Tensor, auxiliary: list[Any]) -> Tensor:
    auxiliary.append(model(x).mean())
    return mean_square(model(x))


def step_over(device: torch.device, loss_fn: Loss, **options: Any) -> graphfsdp.CapturedStep:
    model = make_model(device)
    return graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn, **options)


class Log:
    loss: Any = None


@dataclass
class Count:
    count: int = 0


def sets_a_number(model: nn.Module, x: Tensor, log: dict[str, Any]) -> Tensor:
    log["step"] = 17
    return mean_square(model(x))


def sets_an_attribute(model: nn.Module, x: Tensor, log: Any) -> Tensor:
    loss = log.loss = mean_square(model(x))
    return loss


def counts(model: nn.Module, x: Tensor, count: Any) -> Tensor:
    count.count += 1
    return mean_square(model(x))


def sets_a_key(model: nn.Module, x: Tensor, log: Any) -> Tensor:
    loss = log["loss"] = mean_square(model(x))
    return loss


REFUSED: dict[str, tuple[Loss, Any, str, Any]] = {
    "a number": (sets_a_number, {}, r"17 to args\[1\]\['step'\]", None),
    "an attribute": (sets_an_attribute, Log(), r"args\[1\] is a Log.*dict", Batch(torch.ones(1))),
    "a count": (counts, Count(), r"into args\[1\]", None),
    "a key": (sets_a_key, UserDict(), r"args\[1\] is a UserDict.*dict", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_replay_can_write_is_refused_in_the_first_call(
    name: str, device: torch.device
) -> None:
    loss_fn, given, message, remedy = REFUSED[name]
    step = step_over(device, loss_fn)
    x = torch.ones(6, 4, device=device)
    errors = (graphfsdp.CaptureError, graphfsdp.ConfigError)
    with pytest.raises(errors, match=message) as caught:
        step(x, copy.deepcopy(given))
    assert "Remedy: " in str(caught.value)
    if remedy is None:  # "write it outside of the iteration"
        step = step_over(device, lambda model, x, _: mean_square(model(x)))
        remedy = given
    for _ in range(NUM_CALLS):
        step(x, copy.deepcopy(remedy))


@pytest.mark.parametrize("kind", ["container", "tensor", "view"])
def test_what_is_written_and_given_twice_is_refused_by_name(
    kind: str, device: torch.device
) -> None:
    x, state = torch.ones(6, 4, device=device), {"h": torch.zeros(6, 4, device=device)}
    given: tuple[Any, ...] = {
        "container": (x, state, [state]),
        "tensor": (x, state, state["h"]),
        "view": (x, state, state["h"][0]),
    }[kind]

    def loss_fn(model: nn.Module, x: Tensor, state: Any, _: Any) -> Tensor:
        return (carries if kind == "container" else carries_in_place)(model, x, state)

    with pytest.raises(graphfsdp.CaptureError, match=r"writes into args\[1\].*pass it once"):
        step_over(device, loss_fn)(*given)
    step = step_over(device, lambda model, x, state: loss_fn(model, x, state, [state]))
    for _ in range(NUM_CALLS):
        step(x, state)


def test_evaluation_writes_into_its_batch(device: torch.device) -> None:
    model = make_model(device)
    log: dict[str, Any] = {}
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=logs) as step:
        for x in inputs(device):
            log.clear()
            step.evaluate({"x": x}, log)
            with torch.no_grad():
                y = model.eval()(x)
            model.train()
            assert set(log) == {"mean", "parts"}
            assert same_bits(log["mean"], y.mean())
            assert same_bits(log["parts"][1][0], y.max())


def test_no_batch_outlives_its_call(device: torch.device) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        return mean_square(y), y

    for one in (lambda model, x: mean_square(model(x)), loss_fn):
        step = step_over(device, one)
        for call in (step, step.evaluate) * 6:
            x = torch.ones(6, 4, device=device)
            held = weakref.ref(x)
            call(x)
            del x
            assert held() is None


def test_a_call_that_fails_and_an_example_leave_the_batch_as_it_was(device: torch.device) -> None:
    def fails(model: nn.Module, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        loss = carries(model, x.mul_(2), state)
        if raises["now"]:
            raise KeyError("of the user's")
        return loss

    raises = {"now": False}
    x, state = torch.ones(6, 4, device=device), {"h": torch.zeros(6, 4, device=device)}
    step = step_over(device, fails, example_batch=(x, state))
    assert same_bits(x, torch.ones_like(x))
    assert same_bits(state["h"], torch.zeros_like(x))
    step = step_over(device, fails)
    raises["now"] = True
    with pytest.raises(KeyError):
        step(x, state)
    assert same_bits(x, torch.ones_like(x))
    assert same_bits(state["h"], torch.zeros_like(x))


class Collects(nn.Module):
    """Writes into a list or dict that it is given, or asks for gradients of an input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = make_model(torch.device("cpu"))
        self.kind = kind

    def forward(self, x: Tensor, others: Any) -> Tensor:
        if self.kind == "requires_grad":
            x.requires_grad_(True)
        y: Tensor = self.net(x)
        if self.kind == "list":
            others.append(y.mean())
        elif self.kind == "dict":
            others["h"] = y.detach() + others["h"]
        elif self.kind == "dataclass":
            return Batch(y, notes=[x.mean() + others.x.sum()])  # type: ignore[return-value]
        return y


@pytest.mark.parametrize("kind", ["list", "dict", "requires_grad", "dataclass"])
def test_a_part_that_writes_into_what_it_is_given_runs_as_written(
    kind: str, device: torch.device
) -> None:
    def train(*, in_place: bool) -> tuple[list[Tensor], str]:
        model = Collects(kind).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        parts = graphfsdp.capture_in_place(model, optimizer, keep="all") if in_place else None
        state = {"h": torch.zeros(6, 4, device=device)}
        seen: list[Tensor] = []
        for x in inputs(device):
            others: Any = {"list": [], "dict": state, "dataclass": Batch(x)}.get(kind)
            y: Any = model(x, others)
            if isinstance(y, Batch):
                y = y.x + y.notes[0]
            optimizer.zero_grad()
            if kind == "requires_grad":
                seen += torch.autograd.grad(y.sum(), x, retain_graph=True)
            mean_square(y).backward()
            optimizer.step()
            seen += [y.detach().clone(), *leaves_of(others)]
        report = "" if parts is None else str(parts.report())
        return [*seen, *(param.detach() for param in model.parameters())], report

    expected, _ = train(in_place=False)
    got, report = train(in_place=True)
    assert all(same_bits(one, other) for one, other in zip(expected, got, strict=True))
    why = {
        "list": "writes into a container",
        "dict": "writes into a container",
        "requires_grad": "changes requires_grad of an input",
        "dataclass": "Collects: captured",
    }
    assert why[kind] in report
