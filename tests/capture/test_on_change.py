"""Other batches, and other models: a graph for each, or eagerly, bit for bit the eager run."""

import itertools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_state, run_as_eager, snapshot
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


@pytest.fixture(autouse=True)
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
