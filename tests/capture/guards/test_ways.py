"""Whatever way code goes to a value: a change of it is named, and one of its own is refused."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import refusal_of
from footgun_net import inputs, start
from graphfsdp import HazardKind
from ways_to_a_value import WAYS, Told, Way

CPU = torch.device("cpu")


def one() -> int:
    return 1


HELPER = one


def of_helper() -> Way:
    def put(n: int) -> None:
        global HELPER
        HELPER = one if n == 1 else lambda: n

    return Way(lambda: HELPER(), put, "'HELPER' .* one function .* another function")


def of_defaults() -> Way:
    def read(weight: int = 1) -> int:
        return weight

    put = lambda n: setattr(read, "__defaults__", (n,))  # noqa: E731
    return Way(lambda: read(), put, "the default arguments of")


def of_code() -> Way:
    def read() -> int:
        return 1

    codes = {1: read.__code__, 2: (lambda: 2).__code__}
    return Way(lambda: read(), lambda n: setattr(read, "__code__", codes[n]), "the code of .*read")


def of_keyword() -> Way:
    given = functools.partial(lambda weight: weight, weight=1)
    put = lambda n: given.keywords.update(weight=n)  # noqa: E731
    return Way(lambda: given(), put, "keyword 'weight' of a functools.partial")


def of_its_class() -> Way:
    """Return the way to what an object has of its class until it gets something of its own."""
    owner = Told()

    def put(n: int) -> None:
        if n == 1:
            vars(owner).clear()
        else:
            owner.weight = n

    return Way(lambda: owner.weight, put, "'weight' of .* was missing")


def of_absent(owner: Any) -> Way:
    """Return the way to what is asked for by its name, with a default until it is there."""

    def put(n: int) -> None:
        if n != 1:
            owner.absent = n
        elif hasattr(owner, "absent"):
            del owner.absent

    return Way(lambda: getattr(owner, "absent", 1), put, "'absent' of .* was missing")


def of_memory() -> Way:
    weight = torch.ones(())
    memory = {1: weight.data, 2: torch.full((), 2.0)}
    named = "closure variable 'weight' .* in other memory"
    return Way(lambda: weight, lambda n: setattr(weight, "data", memory[n]), named)


def of_tensor() -> Way:
    state = types.SimpleNamespace(weight=None)
    tensors = {1: torch.ones(()), 2: torch.full((), 2.0)}
    named = "'weight' of closure variable 'state' .*one Tensor.*another Tensor"
    return Way(lambda: state.weight, lambda n: setattr(state, "weight", tensors[n]), named)


# What is replaced, and no iteration counts in.
REPLACED: dict[str, Callable[[], Way]] = {
    "function": of_helper,
    "default_arguments": of_defaults,
    "code": of_code,
    "keyword_of_a_partial": of_keyword,
    "attribute_of_its_class": of_its_class,
    "absent_attribute": lambda: of_absent(types.SimpleNamespace()),
    "absent_attribute_of_a_class": lambda: of_absent(type("Settings", (), {})),
    "memory_of_a_tensor": of_memory,
    "tensor": of_tensor,
}


@pytest.mark.parametrize("name", [*WAYS, *REPLACED])
def test_a_value_that_has_changed_is_named_until_it_is_put_back(name: str) -> None:
    way = (WAYS | REPLACED)[name]()
    way.put(1)
    step, *_ = start(CPU, lambda model, x: model(x) * way.read(), warmup_steps=1)
    for _ in range(3):
        before = step(inputs(CPU))
    way.put(2)
    with pytest.raises(graphfsdp.GuardError, match=way.named) as caught:
        step(inputs(CPU))
    assert "Remedy:" in str(caught.value)
    way.put(1)
    assert torch.equal(step(inputs(CPU)), before)
    assert step.report().num_captures == 1


@pytest.mark.parametrize("name", WAYS)
def test_a_count_that_one_day_decides_is_refused_at_once(name: str) -> None:
    way = WAYS[name]()
    way.put(1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss * 2 if way.counted() > 1_000 else loss

    error = refusal_of(loss_fn)
    assert "moves Python" in str(error)
    assert "reads it for more" in str(error)
    assert " -> " in str(error)
    assert error.kind is HazardKind.BAKED_NUMBER
