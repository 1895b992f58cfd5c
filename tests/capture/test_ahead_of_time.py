"""example_batch: a graph before the first batch, and training as if it had not been."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from adam_helpers import make_muon
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import (
    NUM_STEPS,
    Batch,
    Case,
    assert_same_run,
    assert_same_state,
    run,
    snapshot,
)
from zoo import ROWS, features
from zoo_models import Statistical

Params = list[nn.Parameter]
MUON = partial(make_muon, lr=1e-2)
EXAMPLE = torch.full((ROWS, 5), 7.0)


class Model(Statistical):
    """With a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(3)
        torch.rand(1, generator=self.generator, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator, device=x.device))


@pytest.fixture
def model(device: torch.device) -> Model:
    return Model(device).to(device)


def fused_adam(params: Params) -> torch.optim.Optimizer:
    return FusedAdam(params, weight_decay=0.1, amsgrad=True, skip_nonfinite=True)


def sgd(params: Params) -> torch.optim.Optimizer:
    """Return one whose first step is not one from a momentum of zero."""
    lr = torch.tensor(1e-2, device=params[0].device)
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5, fused=True)


def trained_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train, as before a checkpoint that was loaded."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 5).to(next(model.parameters()).device)).backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("optimizer", "setup"),
    [*itertools.product([fused_adam, "adamw", sgd], [None, trained_before]), (MUON, None)],
)
def test_training_is_the_one_that_captured_on_its_way(
    optimizer: Any, setup: Any, device: torch.device
) -> None:
    case = Case(lambda: Model(device), features(5), setup=setup)
    options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 1.0}
    expected = run(case, "none", device, **options)
    got = run(case, "full_iteration", device, example_batch=(EXAMPLE.to(device),), **options)
    assert_same_run(expected, got)
    assert got.report.num_captures == 1
    eager = 0 if setup or optimizer in (fused_adam, MUON) else 1
    assert got.report.num_calls.get("eager", 0) == eager
    assert got.report.num_calls["replay"] == NUM_STEPS - eager


@pytest.mark.parametrize("scope", ["forward_backward", "none"])
def test_other_scopes(scope: str, device: torch.device) -> None:
    case = Case(lambda: Model(device), features(5))
    got = run(case, scope, device, optimizer="adamw", example_batch=EXAMPLE.to(device))
    assert_same_run(run(case, "none", device, optimizer="adamw"), got)
    assert got.report.num_captures == (scope != "none")


def test_keyword_batches_microbatches_and_another_shape_later(device: torch.device) -> None:
    def keywords(generator: torch.Generator) -> Batch:
        rows = 6 if torch.rand((), generator=generator) < 0.5 else 4
        return Batch(kwargs={"x": torch.randn(rows, 5, generator=generator)})

    case = Case(lambda: Model(device), keywords, lambda model, *, x: model(x))
    options: dict[str, Any] = {"microbatches": 2, "on_change": "recapture"}
    example = {"x": torch.zeros(6, 5, device=device)}
    got = run(case, "full_iteration", device, example_batch=example, **options)
    assert_same_run(run(case, "none", device, **options), got)
    assert got.report.num_captures == 2


def test_a_capture_leaves_no_trace_and_refuses_a_batch_unlike_the_example(
    model: Model, device: torch.device
) -> None:
    optimizer = FusedAdam(model.parameters())
    model.kept = torch.zeros((), device=device)
    before = snapshot(model, optimizer)
    with graphfsdp.capture(model, optimizer, example_batch=EXAMPLE.to(device)) as step:
        assert step.phase is Phase.REPLAY
        assert not any(each.any() for state in optimizer.state.values() for each in state.values())
        optimizer.state.clear()
        # Of the example: nobody reads it before the first step.
        model.kept = torch.zeros((), device=device)
        assert_same_state(before, snapshot(model, optimizer))
        with pytest.raises(graphfsdp.BatchMismatchError, match=r"\(12, 5\).*\(4, 5\)"):
            step(torch.zeros(4, 5, device=device))


def test_an_iteration_that_cannot_be_captured_is_refused_at_once_without_a_trace(
    model: Model,
) -> None:
    optimizer = FusedAdam(model.parameters())
    before = snapshot(model, optimizer)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.item()

    with pytest.raises(graphfsdp.CaptureError, match="_local_scalar_dense"):
        graphfsdp.capture(model, optimizer, loss_fn=loss_fn, example_batch=EXAMPLE)
    assert_same_state(before, snapshot(model, optimizer))
    with graphfsdp.capture(model, optimizer) as step:
        for _ in range(5):
            step(EXAMPLE)
