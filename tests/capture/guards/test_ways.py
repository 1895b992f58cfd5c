"""Whatever way code goes to a value: a change of it is named, and one of its own is refused."""

import argparse
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import refusal_of
from footgun_net import inputs, start
from graphfsdp import HazardKind
from ways_to_a_value import WAYS, Data, Special

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", WAYS)
def test_a_value_that_has_changed_is_named_until_it_is_put_back(name: str) -> None:
    way = WAYS[name]()
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


@pytest.mark.parametrize("owner", [Special(), Data(), argparse.Namespace(weight=1)])
def test_what_nothing_reads_of_an_object_may_change(owner: Any) -> None:
    owner.weight = 1
    step, *_ = start(CPU, lambda model, x: model(x) * owner.weight)
    for epoch in range(6):
        owner.unread = owner.epoch = epoch
        step(inputs(CPU))
    assert step.phase is graphfsdp.Phase.REPLAY
