"""example_batch: a graph before the first batch, and training as if it had not been."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam, Muon
from helpers import assert_same_state, assert_same_states, set_lr, snapshot
from zoo_models import Statistical

NUM_STEPS = 14


class Model(Statistical):
    """With a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(3)
        torch.rand(1, generator=self.generator, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator, device=x.device))


def optimizer_for(name: str, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    on_gpu = device.type == "cuda"
    lr = torch.tensor(1e-2, device=device)
    params = list(model.parameters())
    if name == "fused_adam":
        return FusedAdam(params, lr=1e-2, weight_decay=0.1, amsgrad=True, skip_nonfinite=True)
    if name == "muon":
        matrices, others = ([p for p in params if (p.dim() == 2) is kind] for kind in (True, False))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "use_muon": False}]
        return Muon(groups, lr=1e-2)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, fused=True, capturable=on_gpu)
    assert name == "sgd"  # its first step is not one from a momentum of zero
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5, fused=True)


def train(
    name: str,
    device: torch.device,
    *,
    example: object,
    trained_before: bool = False,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], graphfsdp.CaptureReport]:
    torch.manual_seed(0)
    model = Model(device).to(device)
    optimizer = optimizer_for(name, model, device)
    if trained_before:  # as after a checkpoint was loaded
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(6, 5).to(device)).backward()
            optimizer.step()
        optimizer.zero_grad()
    model.kept = torch.zeros((), device=device)
    before = snapshot(model, optimizer)
    step = graphfsdp.capture(model, optimizer, example_batch=example, **options)
    if example is not None and options.get("scope") != "none":
        assert step.phase is Phase.REPLAY
        after = snapshot(model, optimizer)
        for state in (before, after):
            state.pop("attribute .kept")  # of the example: nobody reads it before the first step
        if name in ("fused_adam", "muon") and not trained_before:
            after = {key: value for key, value in after.items() if not key.startswith("state ")}
            assert all(
                not value.any() for value in optimizer.state.values() for value in value.values()
            )
        assert_same_state(before, after, "after the capture")
    states = []
    with step:
        for index in range(NUM_STEPS):
            set_lr(optimizer, 1e-2 / (1 + index))
            loss = step(torch.randn(6, 5).to(device))
            states.append({"loss": loss, **snapshot(model, optimizer)})
            states[-1]["own generator"] = model.generator.get_state()
        return states, step.report()


@pytest.mark.parametrize(
    ("name", "trained_before"),
    [*itertools.product(["fused_adam", "adamw", "sgd"], [False, True]), ("muon", False)],
)
def test_training_is_the_one_that_captured_on_its_way(
    name: str, trained_before: bool, device: torch.device
) -> None:
    example = torch.full((6, 5), 7.0, device=device)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "trained_before": trained_before}
    expected, _ = train(name, device, example=None, **options)
    got, report = train(name, device, example=(example,), **options)
    assert_same_states(expected, got)
    assert report.num_captures == 1
    eager = 0 if trained_before or name in ("fused_adam", "muon") else 1
    assert report.num_calls.get("eager", 0) == eager
    assert report.num_calls["replay"] == NUM_STEPS - eager


@pytest.mark.parametrize("scope", ["forward_backward", "none"])
def test_other_scopes(scope: str, device: torch.device) -> None:
    expected, _ = train("adamw", device, example=None, scope="none")
    got, report = train("adamw", device, example=torch.ones(6, 5, device=device), scope=scope)
    assert_same_states(expected, got)
    assert report.num_captures == (scope != "none")


def test_keyword_batches_microbatches_and_another_shape_later(device: torch.device) -> None:
    def loss_fn(model: nn.Module, *, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss

    def run(example: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model(device).to(device)
        optimizer = FusedAdam(model.parameters())
        with graphfsdp.capture(
            model,
            optimizer,
            loss_fn=loss_fn,
            microbatches=2,
            example_batch=example,
            on_change="recapture",
        ) as step:
            return [
                step(x=torch.randn(4 if index % 5 == 4 else 6, 5).to(device))
                for index in range(NUM_STEPS)
            ]

    expected = run(None)
    got = run({"x": torch.zeros(6, 5, device=device)})
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_batch_unlike_the_example_is_refused(device: torch.device) -> None:
    model = Model(device).to(device)
    example = torch.zeros(6, 5, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), example_batch=example) as step:
        with pytest.raises(graphfsdp.BatchMismatchError, match=r"\(6, 5\).*\(4, 5\)"):
            step(torch.zeros(4, 5, device=device))
        step(torch.zeros(6, 5, device=device))


def test_an_iteration_that_cannot_be_captured_is_refused_at_once_without_a_trace(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    model = Model(device).to(device)
    optimizer = FusedAdam(model.parameters())
    before = snapshot(model, optimizer)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.item()

    with pytest.raises(graphfsdp.CaptureError, match="_local_scalar_dense"):
        graphfsdp.capture(model, optimizer, loss_fn=loss_fn, example_batch=torch.ones(6, 5))
    assert_same_state(before, snapshot(model, optimizer))
    with graphfsdp.capture(model, optimizer) as step:
        for _ in range(5):
            step(torch.ones(6, 5, device=device))
