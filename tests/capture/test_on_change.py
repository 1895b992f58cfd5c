"""Batches, and models, unlike the first: refused by name, or a graph for each, or eagerly."""

import itertools
import logging
import types
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphfsdp
from graphfsdp import BatchMismatchError, ConfigError, Phase
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_state, run, run_as_eager, snapshot
from zoo import features
from zoo_models import Statistical

LENGTHS = (4, 6, 4, 6, 8, 4, 8, 6, 4, 8, 8, 6, 4, 3, 6, 8, 4, 6, 8, 4)


def of_lengths(*lengths: int) -> Callable[[torch.Generator], Batch]:
    """Return what makes batches of these lengths, for one run after another.

    The longest differ from each other by a word alone.
    """
    calls = itertools.count()

    def batch(generator: torch.Generator) -> Batch:
        length = lengths[next(calls) % len(lengths)]
        rows = torch.randn(min(length, 6), 5, generator=generator)
        return Batch((rows,), {"form": "long" if length > 6 else "short"})

    return batch


AROUND = types.SimpleNamespace(scale=1.0)  # what the loss reads beside the model


def scaled(model: nn.Module, x: Tensor, form: str) -> Tensor:
    loss: Tensor = model(x) * (AROUND.scale if form == "short" else 2.0)
    return loss


def train(
    device: torch.device, lengths: tuple[int, ...], **options: Any
) -> graphfsdp.CaptureReport:
    """Train by batches of these lengths, captured and in a plain loop, which must agree."""
    case = Case(Statistical, of_lengths(*lengths), scaled)
    # Of torch's, which finds gradients clipped, as in a plain loop.
    options |= {"num_steps": len(lengths), "max_grad_norm": 1.0, "optimizer": "adamw"}
    return run_as_eager(case, device, beside="plain", **options).report


def captured(device: torch.device, **options: Any) -> graphfsdp.CapturedStep:
    model = Statistical().to(device)
    return graphfsdp.capture(model, FusedAdam(model.parameters()), **options)


RECAPTURE: dict[str, Any] = {"on_change": "recapture"}
TWO: dict[str, Any] = {**RECAPTURE, "max_graphs": 2}
GIVEN_UP = "given up: there are more than max_graphs=2"
# name: (lengths, options, calls, what is said how often)
KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, int], dict[str, int]]] = {
    # Lengths 4, 6 and 8 were captured when they came after the warm-up for the second time;
    # length 3 has come once.
    "a_graph_for_each_in_any_order": (
        *(LENGTHS, RECAPTURE),
        {"warmup": 5, "capture": 3, "replay": len(LENGTHS) - 8},
        {"given up": 0},
    ),
    # 8 displaced 6, and then 6 displaced 8; 4 was always the one that had been used later.
    "least_recently_used_are_given_up": (
        (4,) * 5 + (6,) * 3 + (4, 8, 8, 8, 4, 6, 6, 6, 4),
        *(TWO, {"warmup": 6, "capture": 4, "replay": 7}, {GIVEN_UP: 2}),
    ),
    "more_than_graphs_taking_turns": (
        (4, 6, 8) * 5,
        *(TWO, {"warmup": 15}, {GIVEN_UP: 13}),
    ),
    "nobody_is_told_without_graphs": (
        (4, 6, 8) * 5,
        *({**TWO, "scope": "none"}, {"eager": 15}, {"graph": 0}),
    ),
    "a_strange_one_runs_eagerly": (
        (4,) * 6 + (3, 4, 4, 7, 3, 4) + (4,) * 6,
        {"on_change": "eager"},
        {"warmup": 3, "capture": 1, "replay": 11, "eager": 3},
        {"running eagerly: batch leaf args[0]: expected": 3},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_batches_train_as_in_a_plain_loop(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    lengths, options, num_calls, said = KINDS[name]
    with caplog.at_level(logging.INFO, logger="graphfsdp"):
        report = train(device, lengths, **options)
    assert report.num_calls == num_calls
    messages = "\n".join(caplog.messages)
    assert {words: messages.count(words) for words in said} == said


@pytest.mark.parametrize("policy", ["recapture", "eager"])
def test_the_number_of_microbatches_may_change(policy: str, device: torch.device) -> None:
    numbers = (1, 1, 1, 1, 2, 2, 2, 1, 4, 4, 2, 1, 4, 2, 1, 1)

    def between(step: Any, model: nn.Module, index: int) -> None:
        step.microbatches = numbers[(index + 1) % len(numbers)]

    options: dict[str, Any] = {"on_change": policy, "num_steps": len(numbers)}
    report = run_as_eager(Case(Statistical, features(5)), device, between=between, **options).report
    assert report.num_captures == (3 if policy == "recapture" else 1)


def test_another_number_of_microbatches_is_refused_by_default(device: torch.device) -> None:
    x = torch.randn(4, 5, device=device)
    with captured(device) as step:
        step(x)
        step.microbatches = 2
        with pytest.raises(graphfsdp.BatchMismatchError, match="microbatches was 1 and is now 2"):
            step(x)
        step.microbatches = 1
        step(x)
        with pytest.raises(graphfsdp.ConfigError, match="microbatches"):
            step.microbatches = 0


def test_a_new_kind_of_batch_that_cannot_be_captured_leaves_the_other_graphs(
    device: torch.device,
) -> None:
    model = Statistical().to(device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.item() if len(x) == 6 else loss

    optimizer = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, on_change="recapture") as step:
        for _ in range(5):
            step(torch.randn(4, 5, device=device))
        step(torch.randn(6, 5, device=device))
        before = snapshot(model, optimizer)
        with pytest.raises(graphfsdp.CaptureError):
            step(torch.randn(6, 5).to(device))
        after = snapshot(model, optimizer)
        after["generator of the cpu"] = before["generator of the cpu"]  # drew the batch
        assert_same_state(before, after)
        assert step.phase is Phase.REPLAY
        step(torch.randn(4, 5, device=device))
        assert step.report().num_calls["replay"] == 2


def test_graphs_share_one_pool(device: torch.device) -> None:
    """Together they need what the largest needs, evaluation included."""

    def pool_bytes(*lengths: int, evaluates: bool = False) -> int:
        with captured(device, on_change="recapture") as step:
            for length in lengths:
                x = torch.randn(64 * length, 5).to(device)
                step(x)
                if evaluates:
                    step.evaluate(x)
            return step.report().pool_bytes

    largest = pool_bytes(*(128,) * 5)
    assert largest > 100_000
    together = pool_bytes(*(96,) * 5, *(128,) * 3, *(64,) * 3, 96, evaluates=True)
    assert together <= 1.05 * largest


NUM_STEPS = 20
CHANGED_AT = 8
Change = Callable[[Statistical, torch.optim.Optimizer], Any]


def another_module(model: Statistical, optimizer: torch.optim.Optimizer) -> None:
    model.last = nn.Linear(8, 1).to(model.first.weight.device)
    optimizer.add_param_group({"params": list(model.last.parameters())})


def replaced_state(model: Statistical, optimizer: torch.optim.Optimizer) -> None:
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].clone()


CASES: dict[str, tuple[str, Change]] = {
    "evaluation_mode": ("fused_adam", lambda model, optimizer: model.eval()),
    "a_number": ("fused_adam", lambda model, optimizer: setattr(model, "scale", 0.5)),
    "a_number_around": ("fused_adam", lambda *trained: setattr(AROUND, "scale", 0.5)),
    "a_baked_number": (
        "adamw",
        lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    ),
    "a_hook": (
        "fused_adam",
        lambda model, optimizer: model.first.register_forward_hook(lambda _, args, out: out * 2),
    ),
    "a_frozen_parameter": (
        "fused_adam",
        lambda model, optimizer: model.first.requires_grad_(False),
    ),
    "another_module": ("fused_adam", another_module),
    "another_module_of_sgd": ("sgd", another_module),
    "moved_memory": (
        "fused_adam",
        lambda model, optimizer: setattr(
            model.first.weight, "data", model.first.weight.detach().clone()
        ),
    ),
    "replaced_state": ("adamw", replaced_state),
    "a_switch": (
        "fused_adam",
        lambda model, optimizer: torch.use_deterministic_algorithms(
            not torch.are_deterministic_algorithms_enabled()
        ),
    ),
}


@pytest.fixture
def _switches_stay() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def changing(
    change: Callable[[int, Any, torch.optim.Optimizer], object],
    lengths: tuple[int, ...] = (6,),
) -> Case:
    """Return a training in which something happens before each call but the first."""

    def setup(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        AROUND.scale = 1.0
        calls = itertools.count(1)
        return lambda: change(next(calls), model, optimizer)

    return Case(Statistical, of_lengths(*lengths), scaled, setup)


@pytest.mark.usefixtures("_switches_stay")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("on_change", ["recapture", "eager"])
def test_a_change_is_captured_anew_or_runs_eagerly(
    on_change: str, name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, change = CASES[name]
    case = changing(lambda index, *trained: index == CHANGED_AT and change(*trained))
    options: dict[str, Any] = {"optimizer": optimizer, "num_steps": NUM_STEPS}
    with caplog.at_level(logging.WARNING, logger="graphfsdp"):
        report = run_as_eager(case, device, on_change=on_change, **options).report
    if on_change == "eager":
        assert report.num_captures == 1
        assert report.num_calls["eager"] == NUM_STEPS - CHANGED_AT
        return
    assert report.num_calls == {"warmup": 4, "capture": 2, "replay": NUM_STEPS - 6}
    assert caplog.text.count("all graphs are given up") == 1
    assert " was " in caplog.text  # what it was that has changed
    assert "Remedy, should it go on changing: " in caplog.text


def test_a_change_that_is_undone_leaves_the_graph(device: torch.device) -> None:
    case = changing(lambda index, model, _: model.train(index not in (6, 7, 12)))
    report = run_as_eager(case, device, num_steps=NUM_STEPS, on_change="eager").report
    assert report.num_calls == {"warmup": 3, "capture": 1, "replay": NUM_STEPS - 7, "eager": 3}


def test_a_change_between_two_captures_spoils_the_first_graph(device: torch.device) -> None:
    """Baked numbers are those of all graphs: a second kind of batch does not hide a change."""

    def change(index: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 6:  # the call that would capture the second kind
            optimizer.param_groups[0]["momentum"] = 0.1

    case = changing(change, (6,) * 5 + (4,) * 4 + (6,) * 7)
    options: dict[str, Any] = {"optimizer": "sgd", "num_steps": 16, "on_change": "recapture"}
    assert run_as_eager(case, device, **options).report.phase == Phase.REPLAY.value


CPU = torch.device("cpu")


def loss_of(
    model: nn.Module, batch: dict[str, Any], weights: Tensor, *, power: float = 2.0
) -> Tensor:
    x = batch["x"] + batch["nested"][0]
    loss: Tensor = ((model(x) * weights.unsqueeze(1)).abs() ** power).mean()
    return loss


def good(device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    x = torch.randn(8, 4, device=device)
    batch = {"x": x, "nested": [torch.randn(8, 4, device=device), "name"]}
    return [batch, torch.rand(8, device=device)], {"power": 2.0}


OfBatch = Callable[[list[Any], dict[str, Any]], object]


def set_x(make: Callable[[Tensor], Any]) -> OfBatch:
    return lambda args, kwargs: args[0].update(x=make(args[0]["x"]))


def set_weights(make: Callable[[Tensor], Any]) -> OfBatch:
    return lambda args, kwargs: args.append(make(args.pop()))


def set_power(value: Any) -> OfBatch:
    return lambda args, kwargs: kwargs.update(power=value)


def set_nested(make: Callable[[list[Any]], Any]) -> OfBatch:
    return lambda args, kwargs: args[0].update(nested=make(args[0]["nested"]))


MISMATCHES: dict[str, tuple[OfBatch, str]] = {
    "batch_of_1": (
        set_x(lambda x: x[:1]),
        r"args\[0\]\['x'\]: expected a torch.float32 tensor of shape \(8, 4\) on \S+ got a "
        r"torch.float32 tensor of shape \(1, 4\)",
    ),
    "last_batch": (set_x(lambda x: x[:5]), r"args\[0\]\['x'\].*\(8, 4\).*\(5, 4\).*drop_last"),
    "0_dimensional": (set_x(lambda x: x.sum()), r"args\[0\]\['x'\].*shape \(\)"),
    "dtype": (
        set_weights(lambda w: w.double()),
        r"args\[1\]: .*got a torch.float64.*args\[1\].to\('c.*float32",
    ),
    "layout": (
        set_weights(lambda w: w.to_sparse()),
        r"args\[1\]: .*got .* of layout torch\.sparse_coo.*args\[1\]\.to_dense\(\)",
    ),
    "device": (set_weights(lambda w: w.to("meta")), r"args\[1\]: .*got .* on meta"),
    "number_for_tensor": (
        set_weights(lambda w: 1.5),
        r"args\[1\]: .*got 1\.5 \(float\).*Remedy: pass a tensor, .*torch\.tensor",
    ),
    "array_for_tensor": (
        set_weights(lambda w: w.cpu().numpy()),
        r"args\[1\]: .*\(ndarray\).*Remedy: pass a tensor, .*torch\.from_numpy",
    ),
    "list_for_tensor": (set_weights(lambda w: [w]), r"args\[1\] is missing, args\[1\]\[0\] is new"),
    "plain_value": (set_power(3.0), r"power: expected 2\.0 \(float\), got 3\.0 \(float\).*baked"),
    "tensor_for_value": (set_power(torch.tensor(2.0)), r"power: expected 2\.0 .*got a torch.float"),
    "missing_keyword": (lambda args, kwargs: kwargs.pop("power"), "power is missing"),
    "new_keyword": (lambda args, kwargs: kwargs.update(mask=torch.ones(8)), "mask is new"),
    "renamed_key": (
        lambda args, kwargs: args[0].update(ids=args[0].pop("x")),
        r"args\[0\]\['x'\] is missing, args\[0\]\['ids'\] is new",
    ),
    "other_container": (set_nested(tuple), "containers differ"),
    "plain_value_deep_inside": (
        set_nested(lambda nested: [nested[0], "other"]),
        r"args\[0\]\['nested'\]\[1\]: expected 'name' \(str\), got 'other' \(str\)"
        r"(?!.*as a tensor).*on_change='recapture'",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("num_calls", [1, 5], ids=["warm-up", "replay"])
def test_a_mismatch_names_the_leaf_and_runs_nothing(
    name: str, num_calls: int, device: torch.device
) -> None:
    step, model = linear_step(device, loss_fn=loss_of)
    for _ in range(num_calls):
        args, kwargs = good(device)
        step(*args, **kwargs)
    state = [param.clone() for param in model.parameters()]
    phase, calls = step.phase, step.report().num_calls
    change, message = MISMATCHES[name]
    args, kwargs = good(device)
    change(args, kwargs)
    with pytest.raises(BatchMismatchError, match=message) as caught:
        step(*args, **kwargs)
    assert "Remedy: " in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))
    assert (step.phase, step.report().num_calls) == (phase, calls)
    args, kwargs = good(device)
    step(*args, **kwargs)  # and a batch that fits goes on


def mean(model: nn.Module, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    loss: Tensor = model(x).mean()
    return loss


def linear_step(
    device: torch.device = CPU, **options: Any
) -> tuple[graphfsdp.CapturedStep, nn.Module]:
    model = nn.Linear(4, 4).to(device)
    options.setdefault("loss_fn", mean)
    return graphfsdp.capture(model, FusedAdam(model.parameters()), **options), model


@pytest.mark.parametrize("first", [0, 1, 2])
def test_other_strides_are_welcome(first: int, device: torch.device) -> None:
    """Static inputs keep the strides of the first batch, in every scope."""
    shapes: list[Callable[[torch.Generator], Tensor]] = [
        lambda generator: torch.randn(8, 4, generator=generator),
        lambda generator: torch.randn(4, 8, generator=generator).t(),
        lambda generator: torch.randn(1, 4, generator=generator).expand(8, 4),
    ]
    numbers = itertools.count(first)
    made = Case(lambda: nn.Linear(4, 1), lambda g: Batch((shapes[next(numbers) % 3](g),)), mean)
    got = run_as_eager(made, device, num_steps=15)
    plain = run(made, "plain", device, num_steps=15)
    torch.testing.assert_close(plain.outputs, got.outputs)


class BatchOfTensors(UserDict[str, Tensor]):
    """A mapping that torch's pytrees do not know, as tokenizers return it."""


class Odd:
    """Compares like an array: with no truth value."""

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Options:
    power: int


def test_a_plain_value_that_changes_in_place_is_another_value() -> None:
    (step, _), x, options = linear_step(), torch.randn(8, 4), Options(power=2)
    for _ in range(6):
        step(x, options)
    step(x, Options(power=2))
    options.power = 4
    with pytest.raises(BatchMismatchError, match=r"power=2.*power=4"):
        step(x, options)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, "text", b"bytes", torch.float32, Odd(), nn.Linear(1, 1)),
        *(float("nan"), complex(0, float("nan"))),  # another NaN is another value
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_of_any_kind_are_equal_to_themselves_alone(value: object) -> None:
    (step, _), x = linear_step(), torch.randn(8, 4)
    for _ in range(6):
        step(x, value)
    with pytest.raises(BatchMismatchError) as caught:
        step(x, Odd())
    assert f"args[1]: expected {value!r}"[:30] in str(caught.value)  # long ones are cut


ONES = torch.ones(8, 4)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({}, (ONES.clone().requires_grad_(),), r"args\[0\] requires a gradient"),
        ({}, (ONES.to_sparse(),), r"args\[0\] is a Tensor of layout torch.sparse_coo"),
        ({}, (torch.nested.nested_tensor([ONES], layout=torch.jagged),), "must be a plain"),
        ({}, (BatchOfTensors(x=ONES),), r"args\[0\] is a BatchOfTensors, whose tensors"),
        ({}, (np.ones(3),), r"args\[0\] is a numpy array.*torch\.from_numpy"),
        ({"microbatches": 3}, (ONES,), r"args\[0\].*\(8, 4\).*into 3 equal"),
        ({"microbatches": 16}, (ONES,), r"args\[0\].*\(8, 4\).*into 16 equal"),
        ({"microbatches": 2}, (ONES, torch.tensor(1.0)), r"args\[1\].*shape \(\)"),
    ],
    ids=["requires_grad", "sparse", "nested", "mapping", "numpy", "3", "16", "0-dimensional"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_first_batch_that_no_graph_can_hold_is_refused(
    options: dict[str, Any], args: tuple[Any, ...], message: str
) -> None:
    step, _ = linear_step(**options)
    with pytest.raises(ConfigError, match=message):
        step(*args)
    step(torch.ones(48, 4))  # a batch that fits starts the step


def test_a_tensor_that_requires_a_gradient_later_is_only_copied(device: torch.device) -> None:
    """The rule is for the first batch; later ones are copied, never linked to the graph."""
    step, _ = linear_step(device)
    for _ in range(5):
        step(torch.randn(8, 4, device=device))
    x = torch.randn(8, 4, device=device, requires_grad=True)
    assert not step(x).requires_grad
    assert x.grad is None


Pair = namedtuple("Pair", ["left", "right"])
LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=2), st.builds(object))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.lists(inner, max_size=3).map(deque),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)
BATCHES = st.tuples(st.lists(NESTED, max_size=3).map(tuple), st.dictionaries(st.text(), NESTED))


@given(BATCHES, BATCHES)
def test_a_batch_fits_if_pytree_finds_equal_leaves_in_an_equal_nesting(
    first: Any, second: Any
) -> None:
    """Whether it is walked quickly, as most are, or by pytree."""
    step, _ = linear_step()
    x, leaves = torch.randn(8, 4), pytree.tree_leaves(first)
    spec = pytree.tree_structure(first)
    step(x, first)
    step(x, pytree.tree_unflatten(leaves, spec))
    others = pytree.tree_leaves(second)
    fits = pytree.tree_structure(second) == spec and all(
        one is other or (type(one) is type(other) and one == other)
        for one, other in zip(leaves, others, strict=True)
    )
    with nullcontext() if fits else pytest.raises(BatchMismatchError):
        step(x, second)
