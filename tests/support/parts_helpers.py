"""Loops with `capture_in_place` and without it, bit for bit. Every part is kept, pays it or not."""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import graphfsdp
from helpers import local_part, same_bits

Loop = Callable[[Any, Any], Iterable[Any]]
Loss = Callable[[Any, int, Tensor, Tensor], Any]  # of a model, an iteration and its batch
Parts = Any  # what capture_in_place returns
DEVICE = ContextVar("DEVICE", default="cpu")  # of models and batches, while a loop is checked


class Net(nn.Module):
    """Linear layers, dropout, batch statistics, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(nn.functional.gelu(self.norm(self.embed(x))))
        part = self.embed.weight[:, :2]  # as it is, behind its cast by autocast
        logits: Tensor = self.head(hidden) * self.scale
        return logits + torch.cat([hidden @ part, hidden[:, :2]], dim=1)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = 12) -> Iterator[tuple[int, Tensor, Tensor]]:
    device = DEVICE.get()
    for index in range(count):
        yield index, torch.randn(8, 6).to(device), torch.randint(4, (8,)).to(device)


def of_logits(model: Any, _: int, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return cross_entropy(output if isinstance(output, Tensor) else output[0], y)


def iterates(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = of_logits(model, 0, x, y)
    loss.backward()
    optimizer.step()
    return loss


def trains(model: Any, optimizer: torch.optim.Optimizer, count: int = 12) -> Iterator[Any]:
    for _, x, y in batches(count):
        yield iterates(model, optimizer, x, y)


def trains_by(loss_of: Loss, count: int = 12) -> Loop:
    """Return a loop over a loss of its own."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index, x, y in batches(count):
            optimizer.zero_grad()
            loss = loss_of(model, index, x, y)
            loss.backward()
            optimizer.step()
            yield loss

    return loop


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def state_of(models: list[nn.Module], optimizers: list[Any]) -> list[Any]:
    """Return weights, gradients, the optimizers' state, and where the generators are."""
    found: list[Any] = [("generator", torch.get_rng_state())]
    if torch.cuda.is_available():
        found.append(("generator of the GPU", torch.cuda.get_rng_state()))
    for model in models:
        found += [(name, local_part(t).clone()) for name, t in model.state_dict().items()]
        grads = [(f"{name}.grad", p.grad) for name, p in model.named_parameters()]
        found += [(name, grad if grad is None else local_part(grad)) for name, grad in grads]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        for key, entries in optimizer.state_dict()["state"].items():
            found += [(f"{key}.{name}", local_part(value)) for name, value in entries.items()]
    return found


def run(
    loop: Loop, captured: bool, make: Any = make_net, optim: Any = make_adam, **options: Any
) -> tuple[list[Any], Parts]:
    """Return what a loop gives and leaves, and its parts."""
    torch.manual_seed(0)
    models = make()
    if DEVICE.get() != "cpu":
        models.to(DEVICE.get())
    optimizers = optim(models)
    torch.manual_seed(7)
    parts = None
    if captured:
        parts = graphfsdp.capture_in_place(models, optimizers, **{"keep": "all", **options})
    given = [("given", torch.as_tensor(each).detach().clone()) for each in loop(models, optimizers)]
    return given + state_of(listed(models), listed(optimizers)), parts


def check(
    loop: Loop, make: Any = make_net, optim: Any = make_adam, device: str = "cpu", **options: Any
) -> Parts:
    """Compare both ways bit for bit; return the parts."""
    before = DEVICE.set(device)
    try:
        expected, _ = run(loop, False, make, optim)
        found, parts = run(loop, True, make, optim, **options)
    finally:
        DEVICE.reset(before)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, one), (_, other) in zip(expected, found, strict=True):
        same = same_bits(one, other) if isinstance(one, Tensor) else one == other
        assert same, (name, one, other)
    assert parts is not None
    return parts


def states(parts: Parts) -> dict[str, str]:
    return {part.name: part.state for part in parts.report().parts}


def replays(parts: Parts) -> int:
    return sum(part.num_replays for part in parts.report().parts)
