"""Loops with `capture_in_place` and without it, bit for bit. Every part is kept, pays it or not."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import graphfsdp
from graphfsdp.in_place.parts import Parts

Loop = Callable[[Any, Any], Any]


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
        logits: Tensor = self.head(hidden) * self.scale
        return logits + torch.cat([hidden @ self.embed.weight[:, :2], hidden[:, :2]], dim=1)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = 12, size: int = 8) -> Iterator[tuple[int, Tensor, Tensor]]:
    for index in range(count):
        yield index, torch.randn(size, 6), torch.randint(4, (size,))


def state_of(models: list[nn.Module], optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for model in models:
        found += [(name, t.clone()) for name, t in model.state_dict().items()]
        found += [(f"{name}.grad", p.grad) for name, p in model.named_parameters()]
    for key, entries in optimizer.state_dict()["state"].items():
        found += [(f"{key}.{name}", value) for name, value in entries.items()]
    return [*found, ("generator", torch.get_rng_state())]


def run(
    loop: Loop, captured: bool, make: Any = make_net, optim: Any = make_adam, **options: Any
) -> tuple[list[float], list[Any], Parts | None]:
    made = make()
    models = made if isinstance(made, list) else [made]
    optimizer = optim(nn.ModuleList(models))
    torch.manual_seed(7)
    parts = None
    if captured:
        parts = graphfsdp.capture_in_place(models, optimizer, **{"keep": "all", **options})
    losses = [number(loss) for loss in loop(made, optimizer)]
    return losses, state_of(models, optimizer), parts


def number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def check(loop: Loop, make: Any = make_net, optim: Any = make_adam, **options: Any) -> Parts:
    """Compare both ways bit for bit; return the parts."""
    losses, state, _ = run(loop, False, make, optim)
    found_losses, found, parts = run(loop, True, make, optim, **options)
    assert found_losses == losses
    assert [name for name, _ in found] == [name for name, _ in state]
    for (name, one), (_, other) in zip(state, found, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other), name
        else:
            assert one == other, name
    assert parts is not None
    return parts


def states(parts: Parts) -> dict[str, str]:
    return {part.name: part.state for part in parts.report().parts}


def replays(parts: Parts) -> int:
    return sum(part.num_replays for part in parts.report().parts)


def trains(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        output = model(x)
        logits = output if isinstance(output, Tensor) else output[0]
        loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        yield loss
