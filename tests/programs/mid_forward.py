"""A model that runs any function in the middle of its forward, and its training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import (
    Batch,
    Case,
    assert_same_state,
    line_of,
    quick_garbage_collection,
    run_as_eager,
    same_bits,
    snapshot,
)

Program = Callable[["Inner", Tensor, Tensor], Tensor]


class Inner(nn.Module):
    """Runs the program on a hidden state and the model's input."""

    gate: Tensor
    attribute: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("gate", torch.full((4,), 0.5))
        self.attribute = torch.ones(4)
        self.extra = nn.Parameter(torch.ones(4))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.attribute = fn(self.attribute)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.program(self, hidden, x)


class Body(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inner = Inner(program)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden, x)
        return out


class Probe(nn.Module):
    """Before the program runs, running statistics and the generator have moved already."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.body = Body(program)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.layer(x)))
        loss: Tensor = self.body(hidden, x).float().square().mean()
        return loss + self.body.inner.extra.mean()


def make_probe(
    program: Program, device: torch.device, **options: Any
) -> tuple[graphfsdp.CapturedStep, Probe, FusedAdam]:
    """Return a step over a probe with a seed of its own."""
    quick_garbage_collection()
    torch.manual_seed(11)
    model = Probe(program).to(device)
    optim = FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1)
    return graphfsdp.capture(model, optim, **options), model, optim


def batches(device: torch.device, count: int) -> list[Tensor]:
    """Return batches that are the same in every run."""
    generator = torch.Generator().manual_seed(13)
    return [torch.randn(8, 4, generator=generator).to(device) for _ in range(count)]


def refusal_of(
    step: graphfsdp.CapturedStep,
    model: nn.Module,
    optim: torch.optim.Optimizer,
    device: torch.device,
) -> graphfsdp.CaptureError:
    """Train until the capture is refused; everything is then as it was."""
    *good, last = batches(device, 4)
    for x in good:
        step(x)
    return refused(step, model, optim, last)


def refused(
    step: graphfsdp.CapturedStep, model: nn.Module, optim: torch.optim.Optimizer, x: Tensor
) -> graphfsdp.CaptureError:
    before = snapshot(model, optim)
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(x)
    assert_same_state(before, snapshot(model, optim), "after the roll-back")
    assert tensors == {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert step.phase is graphfsdp.Phase.WARMUP
    return caught.value


def assert_refused_in(error: graphfsdp.CaptureError, function: Callable[..., Any]) -> None:
    """Ask for the line of a function that is marked ``# refused``."""
    assert error.source is not None
    assert error.source.line == line_of(function, "# refused")


def check_captured(program: Program, device: torch.device) -> None:
    """Train a probe captured, audited and eagerly; compare bit for bit."""

    def batch(generator: torch.Generator) -> Batch:
        return Batch((torch.randn(8, 4, generator=generator),))

    case = Case(lambda: Probe(program), batch)
    report = run_as_eager(case, device, num_steps=16, audit=5).report
    assert report.num_captures == 1
    assert (report.num_calls["replay"], report.num_calls["audit"]) == (10, 2)


def check_refused(program: Program, device: torch.device, **options: Any) -> graphfsdp.CaptureError:
    """Train a probe until it is refused; check the roll-back; go on eagerly; compare.

    Returns:
        The refusal.
    """
    eager = {"scope": "none", "microbatches": options.get("microbatches", 1)}
    step, model, optim = make_probe(program, device, **options)
    every = batches(device, 9)
    losses = [step(x) for x in every[:3]]
    error = refused(step, model, optim, every[3])
    step.close()
    step = graphfsdp.capture(model, optim, **eager)
    losses += [step(x) for x in every[3:]]
    reference, twin, twin_optim = make_probe(program, device, **eager)
    for x, loss in zip(every, losses, strict=True):
        assert same_bits(reference(x), loss)
    assert_same_state(snapshot(twin, twin_optim), snapshot(model, optim), "at the end")
    return error
