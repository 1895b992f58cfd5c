"""What an iteration swaps or counts on the host is refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Case, line_of, run
from zoo import features

CPU = torch.device("cpu")


class Base(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:  # its forward
        y: Tensor = self.linear(x + self.average)
        self.swap(x.detach().mean(0))
        return y.sum()

    def swap(self, mean: Tensor) -> None:
        """By itself nothing."""


class Swaps(Base):
    def swap(self, mean: Tensor) -> None:
        self.average = self.average + mean


class GivesNewMemory(Base):
    def swap(self, mean: Tensor) -> None:
        self.average.data = self.average + mean


class SetsMemory(Base):
    def swap(self, mean: Tensor) -> None:
        with torch.no_grad():
            other = (self.average + mean).clone()
            self.average.set_(other)  # type: ignore[call-overload]


class Outer(Base):
    """Its child's attribute is assigned here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def swap(self, mean: Tensor) -> None:
        self.inner.average = self.inner.average + mean
        self.inner(mean)


@pytest.mark.parametrize("kind", [Swaps, GivesNewMemory, SetsMemory, Outer])
def test_a_buffer_that_is_swapped_is_named(kind: type[Base]) -> None:
    model = kind()
    step = graphfsdp.capture(model, FusedAdam(model.parameters()), warmup_steps=1)
    step(torch.randn(4, 3))
    path = "inner" if kind is Outer else ""
    with pytest.raises(
        graphfsdp.CaptureError, match=f"{path or 'average'}.*update it in place"
    ) as caught:
        step(torch.randn(4, 3))
    assert caught.value.module_path == path
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(Base, "# its forward")


class Spiking(nn.Module):
    """Its potential begins as a number, as those of spiking nets do when they are reset."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.potential: float | Tensor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        spikes = torch.zeros_like(x)
        for _ in range(3):
            potential = self.potential * 0.5 + self.layer(x)
            spike = torch.sigmoid(potential - 1)
            self.potential = potential - spike.detach()
            spikes = spikes + spike
        return spikes.square().mean()


def rest(model: nn.Module) -> None:
    model.potential = 0.0  # type: ignore[assignment]


def from_rest(model: nn.Module, x: Tensor) -> Tensor:
    rest(model)
    loss: Tensor = model(x)
    return loss


def test_a_number_that_becomes_a_tensor_is_refused_and_a_reset_at_the_beginning_captured() -> None:
    def resets(model: nn.Module, optimizer: object) -> Callable[[], object]:
        return lambda: rest(model)

    behind = Case(Spiking, features(4), setup=resets)
    with pytest.raises(graphfsdp.CaptureError, match=r"'potential', which was 0\.0") as caught:
        run(behind, "full_iteration", CPU)
    assert "beginning of the iteration" in str(caught.value)
    at_first = Case(Spiking, features(4), from_rest, setup=lambda model, optimizer: None)
    expected, got = run(behind, "none", CPU), run(at_first, "full_iteration", CPU)
    assert got.report.num_calls["replay"] == 10
    for (one,), (other,) in zip(expected.outputs, got.outputs, strict=True):
        assert torch.equal(one, other)
    assert isinstance(got.snapshots[-1]["attribute .potential"], Tensor)
