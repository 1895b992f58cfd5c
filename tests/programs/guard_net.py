"""A net with one of everything that a guard looks at, captured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CapturedStep
from helpers import assert_same_state, make_optimizer, snapshot

NUM_EAGER = 4  # 3 warm-up calls and the recording


class Data:
    """An object that a module holds."""

    def __init__(self) -> None:
        self.gain = 2.0


class Body(nn.Module):
    """Layers, tensors, a generator, and values of all sorts that the forward pass reads."""

    table: Tensor
    at_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 4))
        self.plain = torch.ones(16)[2:6]
        self.unused = torch.ones(2)
        self.temperature = 2.0
        self.clip = (-8.0, 8.0)
        self.numbers = [2.0, 3.0]
        self.options = {"gain": 1.0}
        self.data = Data()
        self.function = torch.tanh
        self.nothing: float | None = None
        self.tensors = [torch.full((2, 8), 2.0)[:1, 2:6]]
        self.noise = torch.Generator().manual_seed(1)
        self.num_calls = 0
        self.calls_so_far = {"all": 0}

    @classmethod
    def scale(cls) -> float:
        """Return a number; Python binds this anew each time that it is asked for."""
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for layer in self.layers:
            x = layer(x).clamp(*self.clip)
        x = x + torch.rand(x.shape, generator=self.noise)
        gain = self.numbers[0] * self.options["gain"] * self.data.gain * self.at_class
        gain *= self.scale() * type(self).scale()
        x = self.function(x) * self.tensors[0] * (gain if self.nothing is None else self.nothing)
        out: Tensor = self.dropout(self.norm(x)) * self.table * self.plain
        return out


class GuardNet(nn.Module):
    """The body, a scale with a single element, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.linspace(1.0, 2.0, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x * self.frozen)
        loss: Tensor = (hidden / self.body.temperature).square().mean() * self.scale
        return loss


class Around:
    """What a loss function uses beside the model, and what it does not."""

    def __init__(self) -> None:
        layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)]
        self.teacher: Any = nn.Sequential(*layers).eval()
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((1,), 2.0))
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.table = {"shift": torch.ones(4), "unused": torch.ones(2)}
        self.unused = nn.Linear(4, 1)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x * self.mask + self.table["shift"])
        loss: Tensor = model(x) + self.criterion(wanted, x[:, :1].sigmoid())
        return loss


@dataclass
class Guarded:
    """A captured step that has replayed, and what belongs to it."""

    step: CapturedStep
    model: GuardNet
    optim: torch.optim.Optimizer
    around: Around
    batch: Callable[[], Tensor]

    @property
    def body(self) -> Any:
        return self.model.body

    def does(self, code: str, names: dict[str, Any]) -> Any:
        """Do what code says of model, body, optimizer and what is around; return its value."""
        names = names | vars(self) | {"body": self.body}
        try:
            return eval(code, names)
        except SyntaxError:  # a statement
            return exec(code, names)

    def train(self, x: Tensor) -> Tensor:
        """Call the step; the default generator, which twins share, starts anew."""
        torch.manual_seed(9)
        loss: Tensor = self.step(x)
        return loss

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of everything that a replay may change."""
        state = snapshot(self.model, self.optim)
        return state | {"noise": self.model.body.noise.get_state()}


def start(
    optimizer: str = "fused_adam",
    num_calls: int = NUM_EAGER + 1,
    **options: Any,
) -> Guarded:
    torch.manual_seed(5)
    model, around = GuardNet(), Around()
    params = [param for param in model.parameters() if param.requires_grad]
    optim = make_optimizer(optimizer, params, torch.device("cpu"))
    step = graphfsdp.capture(model, optim, **{"loss_fn": around.loss} | options)
    generator = torch.Generator().manual_seed(6)
    guarded = Guarded(step, model, optim, around, lambda: torch.randn(8, 4, generator=generator))
    for _ in range(num_calls):
        step(guarded.batch())
    return guarded


def refused(guarded: Guarded, match: str) -> list[Any]:
    """Check that the next replay is refused and leaves no trace; return the changes."""
    before = guarded.snapshot()
    with pytest.raises(graphfsdp.GuardError, match=match) as caught:
        guarded.step(torch.zeros(8, 4, dtype=torch.float32))
    assert "Remedy:" in str(caught.value)
    assert_same_state(before, guarded.snapshot(), "after the refusal")
    assert guarded.step.phase is graphfsdp.Phase.REPLAY
    return list(caught.value.changes)
