"""A model and a criterion that count their calls in Python."""

from collections.abc import Callable

from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor], Tensor]


class CountingNet(nn.Module):
    """Counts its calls; what it decides is up to those that derive from it."""

    limit = 100  # of the class, not of the instance

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.left = 9
        self.late = 50
        self.early = 1
        self.turn = False
        self.word = "a"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.calls += 1
        self.left -= 1
        return self.decide(y).square().mean()

    def decide(self, y: Tensor) -> Tensor:
        return y


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


class CountingCriterion(nn.Module):
    """A criterion that is a module, and none of the model's."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.step = 0
        self.limit = limit

    def forward(self, loss: Tensor) -> Tensor:
        self.step += 1
        return loss * 2 if self.step > self.limit else loss  # late


def make_by_criterion(limit: int = 1000) -> Loss:
    criterion = CountingCriterion(limit)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = criterion(mean_square(model, x))
        return loss

    return loss_fn
