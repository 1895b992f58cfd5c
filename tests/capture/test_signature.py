"""A batch that differs from the first one raises, names the leaf, and copies nothing."""

import itertools
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
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
from graphfsdp import BatchMismatchError, ConfigError
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, run, run_as_eager

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


Change = Callable[[list[Any], dict[str, Any]], object]


def set_x(make: Callable[[Tensor], Any]) -> Change:
    return lambda args, kwargs: args[0].update(x=make(args[0]["x"]))


def set_weights(make: Callable[[Tensor], Any]) -> Change:
    return lambda args, kwargs: args.append(make(args.pop()))


def set_power(value: Any) -> Change:
    return lambda args, kwargs: kwargs.update(power=value)


def set_nested(make: Callable[[list[Any]], Any]) -> Change:
    return lambda args, kwargs: args[0].update(nested=make(args[0]["nested"]))


MISMATCHES: dict[str, tuple[Change, str]] = {
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
