"""What an iteration swaps or counts on the host is refused with the line that does it."""

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam


class Base(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))


class Swaps(Base):
    def reset(self) -> None:
        self.average = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.average)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return y.sum()


class GivesNewMemory(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.average)
        self.average.data = self.average + x.mean(0)
        return y.sum()


class SetsMemory(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.average)
        with torch.no_grad():
            self.average.set_((self.average + x.mean(0)).clone())  # type: ignore[call-overload]
        return y.sum()


class Outer(nn.Module):
    """Its child's attribute is assigned here, in a method that forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def update(self, x: Tensor) -> None:
        def inside() -> None:
            self.inner.average = self.inner.average + x.detach().mean(0)

        inside()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner.linear(x + self.inner.average)
        self.update(x)
        return y.sum()


CASES: dict[type[nn.Module], tuple[str, str]] = {
    Swaps: ("self.average = 0.9", "Swaps.forward"),
    GivesNewMemory: ("self.average.data =", "GivesNewMemory.forward"),
    SetsMemory: ("self.average.set_(", "SetsMemory.forward"),
    Outer: ("self.inner.average =", "Outer.update.<locals>.inside"),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_line_that_swaps_a_buffer_is_named(kind: type[nn.Module]) -> None:
    model = kind()
    step = graphfsdp.capture(model, FusedAdam(model.parameters()), warmup_steps=1)
    step(torch.randn(4, 3))
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(torch.randn(4, 3))
    text, function = CASES[kind]
    source = caught.value.source
    assert source is not None
    assert text in source.text
    assert function in str(source)
    assert source.file == __file__
