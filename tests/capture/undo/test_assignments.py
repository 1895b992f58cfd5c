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


def from_rest(model: nn.Module, x: Tensor) -> Tensor:
    model.potential = 0.0  # type: ignore[assignment]
    loss: Tensor = model(x)
    return loss


def test_a_number_that_becomes_a_tensor_is_refused_and_a_reset_at_the_beginning_captured() -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(5, 4, generator=generator) for _ in range(14)]

    def trained(scope: str, *, resets_behind: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Spiking()
        loss_fn = None if resets_behind else from_rest
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        seen = []
        with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
            for x in batches:
                seen.append(step(x))
                assert isinstance(model.potential, Tensor)
                seen.append(model.potential.detach().clone())
                if resets_behind:
                    model.potential = 0.0
        return seen

    with pytest.raises(graphfsdp.CaptureError, match=r"'potential', which was 0\.0") as caught:
        trained("full_iteration", resets_behind=True)
    assert "beginning of the iteration" in str(caught.value)
    assert caught.value.source is not None
    assert "self.potential = potential - spike.detach()" in caught.value.source.text
    expected = trained("none", resets_behind=True)
    got = trained("full_iteration", resets_behind=False)
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
