"""A model that runs any function in the middle of its forward, and its training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, line_of, quick_garbage_collection, same_bits, snapshot

Program = Callable[["Inner", Tensor, Tensor], Tensor]


class Inner(nn.Module):
    """Runs the program on a hidden state and the model's input."""

    gate: Tensor
    attribute: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("gate", torch.full((4,), 0.5))
        self.extra = nn.Parameter(torch.ones(4))

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
    model = Probe(program)
    model.body.inner.attribute = torch.ones(4)
    model.to(device)
    model.body.inner.attribute = model.body.inner.attribute.to(device)
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
    *,
    num_good: int = 3,
) -> graphfsdp.CaptureError:
    """Train until a call is refused, usually the capture; everything is then as it was."""
    for x in batches(device, num_good):
        step(x)
    before = snapshot(model, optim)
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(batches(device, 1)[0])
    assert_same_state(before, snapshot(model, optim), "after the roll-back")
    return caught.value


def assert_refused_in(error: graphfsdp.CaptureError, function: Callable[..., Any]) -> None:
    """Ask for the line of a function that is marked ``# refused``."""
    assert error.source is not None
    assert error.source.line == line_of(function, "# refused")


def check_captured(program: Program, device: torch.device, **options: Any) -> None:
    """Train a probe captured and eagerly; compare bit for bit."""
    runs = []
    for scope in ("none", "full_iteration"):
        step, model, optim = make_probe(program, device, scope=scope, **options)
        with step:
            losses = []
            for x in batches(device, 14):
                losses.append((step(x), snapshot(model, optim)))
            assert step.report().num_captures == (scope != "none")
            runs.append(losses)
    for index, (expected, got) in enumerate(zip(*runs, strict=True)):
        assert same_bits(expected[0], got[0]), f"call {index}: loss differs"
        assert_same_state(expected[1], got[1], f"call {index}")


def check_refused(program: Program, device: torch.device, **options: Any) -> graphfsdp.CaptureError:
    """Train a probe until it is refused; check the roll-back; go on eagerly; compare.

    Returns:
        The refusal.
    """
    step, model, optim = make_probe(program, device, **options)
    error: graphfsdp.CaptureError | None = None
    losses = []
    microbatches = options.get("microbatches", 1)
    for index, x in enumerate(batches(device, 9)):
        before = snapshot(model, optim)
        tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        try:
            losses.append(step(x))
        except graphfsdp.CaptureError as refusal:
            assert error is None, "refused twice"
            error = refusal
            assert index == 3
            assert_same_state(before, snapshot(model, optim), "after the roll-back")
            assert tensors == {id(t) for t in (*model.parameters(), *model.buffers())}
            assert step.phase is graphfsdp.Phase.WARMUP
            step.close()
            step = graphfsdp.capture(model, optim, scope="none", microbatches=microbatches)
            losses.append(step(x))
    assert error is not None, "the program was captured"
    reference, twin, twin_optim = make_probe(
        program, device, scope="none", microbatches=microbatches
    )
    for x, loss in zip(batches(device, 9), losses, strict=True):
        assert same_bits(reference(x), loss)
    assert_same_state(snapshot(twin, twin_optim), snapshot(model, optim), "at the end")
    return error
