"""Training loops that look at tensors at any time, or change under way what a graph bakes in."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy

from loops import Loop, batches
from parts_helpers import iterates


class KeepingNet(nn.Module):
    """Keeps two of the tensors that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.1)
        self.kept: list[Tensor] = []
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x).relu())
        self.mean = hidden.detach().mean()
        self.kept[:] = [hidden.detach().amax()]
        out: Tensor = self.last(hidden)
        return out


def make_keeping_net() -> nn.Module:
    torch.manual_seed(0)
    return KeepingNet()


def looks_at_weights(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Views of weights go on looking at them, in later iterations as well."""
    found: list[Any] = []
    for index, x, y in batches(9):
        loss = cross_entropy(model(x), y)
        weight = model.first.weight
        looks = [weight.detach(), weight.data[1], weight.view(-1), *model.state_dict().values()]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), *(look.sum().item() for look in looks)]
        if index == 5:
            kept = looks
    return found + kept


def copies_before_the_step(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _, x, y in batches(9):
        logits = model(x)
        optimizer.zero_grad()
        cross_entropy(logits, y).backward()
        found.append(copy.deepcopy(logits.detach()))
        found += copy.deepcopy(model.state_dict()).values()
        optimizer.step()
    return found


def goes_another_way_without_gradients(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for index, x, y in batches(18):
        logits = model(x)
        loss = cross_entropy(logits, y)
        with torch.no_grad() if index < 9 else torch.inference_mode():
            if index % 9 == 6:
                found.append(logits.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def with_gradients_kept(
    zero: Callable[[nn.Module, torch.optim.Optimizer], Any], *, within: bool
) -> Loop:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        found: list[Any] = []
        kept: list[Tensor | None] = []
        for _, x, y in batches(9):
            loss = cross_entropy(model(x), y)
            if within:
                zero(model, optimizer)
            loss.backward()
            optimizer.step()
            kept += [param.grad for param in model.parameters()]
            found += [grad.clone() for grad in kept if grad is not None]
            if not within:
                zero(model, optimizer)
            found += [grad.clone() for grad in kept if grad is not None]
        return found

    return loop


def takes_off(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def between(do: Callable[[Any, Tensor, Tensor], Any], since: int = 0) -> Loop:
    """Return a loop that does something between the model's call and the step."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        found = []
        for index, x, y in batches(9):
            logits = model(x)
            loss = cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            if index >= since:
                found.append(do(model, x, logits.detach()))
            optimizer.step()
        return [each for each in found if isinstance(each, Tensor)]

    return loop


def reads_what_set_gives(model: Any, x: Tensor, logits: Tensor) -> Tensor:
    held = torch.zeros(())
    held.set_(logits.sum())  # type: ignore[call-overload]
    return held


def writes_memory_of_numpy(model: Any, x: Tensor, logits: Tensor) -> Tensor:
    return torch.from_numpy(np.zeros(3, dtype=np.float32)).add_(logits[0])


def looks_at_weights_of_before(within: Callable[[Tensor], Any]) -> Loop:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        looks = [param.data for param in model.parameters()]
        return between(lambda *_: torch.stack([within(look).sum() for look in looks]))(
            model, optimizer
        )

    return loop


def looks_at_gradients_of_before(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    grads: list[Any] = []
    for _, x, y in batches(9):
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(model(x), y).backward()
        grads = grads or [param.grad for param in model.parameters()]
        for grad in grads:
            grad.mul_(0.5)
        optimizer.step()
    return []


def wants_gradients_of_inputs(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _, x, y in batches(9):
        iterates(model, optimizer, x.requires_grad_(), y)
        found.append(x.grad)
    return found


def keeps_a_loss(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for _, x, y in batches(9):
        loss = cross_entropy(model(x), y) + model.mean
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def has_new_shapes(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for index in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(1 + index, 4)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def trains_the_head(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Gradients of the body, which is not frozen, add up, and are looked at at last."""
    found: list[Any] = []
    for index, x, y in batches(12):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if index >= 8:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return found


def scales(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    losses: list[Any] = []
    for index, x, y in batches(9):
        optimizer.zero_grad()
        loss = cross_entropy(model(x * (float("inf") if index == 4 else 1)), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.isfinite(), scaler.get_scale()]
    return losses


def fetches_between(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """As nanoGPT, which fetches the next batch while the GPU is busy."""
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    losses = []
    for _ in range(9):
        loss = cross_entropy(model(x), y)
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def is_stepped_by_another(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for index, x, y in batches(9):
        losses.append(iterates(model, other if index % 3 == 2 else optimizer, x, y))
    return losses


def of_the_head(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.last.parameters(), lr=0.5)


_KEEPS: dict[str, Loop] = {
    "views of weights": looks_at_weights,
    "copies": copies_before_the_step,
    "another way": goes_another_way_without_gradients,
    "gradients": with_gradients_kept(lambda _, o: o.zero_grad(), within=False),
    "gradients, within": with_gradients_kept(lambda _, o: o.zero_grad(), within=True),
    "gradients, by the model": with_gradients_kept(lambda m, _: m.zero_grad(), within=True),
    "gradients, by hand": with_gradients_kept(takes_off, within=False),
    "gradients, left on": with_gradients_kept(
        lambda _, o: o.zero_grad(set_to_none=False), within=False
    ),
    "set_": between(reads_what_set_gives),
    "memory of NumPy": between(writes_memory_of_numpy),
    "statistics": between(
        lambda _, x, out: batch_norm(out, torch.zeros(3), torch.ones(3), training=True)
    ),
    "functorch": between(lambda _, x, out: torch.func.vmap(torch.sin)(out)),
    "functorch, later": between(lambda _, x, out: torch.func.vmap(torch.sin)(out), since=6),
    "kept by a module": between(lambda model, x, out: model.mean * 2),
    "kept in a list": between(lambda model, x, out: model.kept[0] * 2),
    "a weight of before, written": looks_at_weights_of_before(lambda w: w.clamp_(-1, 1)),
    "a weight of before, read": looks_at_weights_of_before(torch.sum),
    "a gradient of before": looks_at_gradients_of_before,
    "gradients of inputs": wants_gradients_of_inputs,
    "a loss that a module keeps": keeps_a_loss,
    "new shapes": has_new_shapes,
    "the next batch between": fetches_between,
    "another optimizer": is_stepped_by_another,
}
KEEPING: dict[str, tuple[Loop, dict[str, Any]]] = {
    name: (loop, {"make": make_keeping_net}) for name, loop in _KEEPS.items()
}
KEEPING["gradients of the body"] = (
    trains_the_head,
    {"make": make_keeping_net, "optim": of_the_head},
)
KEEPING["a scaler"] = (scales, {})
