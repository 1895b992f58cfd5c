"""Training loops as people write them, to be run with capture and without.

``LOOPS`` do nothing that no graph could hold; ``JUDGED`` one thing each beside the model's call.
"""

import copy
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.overrides import _get_current_function_mode

from graphfsdp.optim import FusedAdam

Loop = Callable[[Any, Any], list[Any]]


def make_net(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = 10) -> Iterator[tuple[int, Tensor, Tensor]]:
    for index in range(count):
        yield index, torch.randn(8, 4), torch.randint(3, (8,))


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for _ in range(9):
        for part in range(4):
            loss = cross_entropy(model(torch.ones(8, 4) * part), torch.arange(8) % 3) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def leaves_some_over(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """An epoch's last batches belong to the next one's first step, with validation between."""
    losses = []
    for _ in range(4):
        model.train()
        for index, x, y in batches(11):
            loss = cross_entropy(model(x), y) / 4
            loss.backward()
            if (index + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(cross_entropy(model(x), y).item())
    return losses


def steps_with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for _, x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(loss.item())
    return losses


def casts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for _, x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            loss = cross_entropy(logits, y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), (logits.argmax(1) == y).float().mean()]
    return losses


def goes_two_ways(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses, kept = [], []
    for index, x, y in batches(20):
        logits = model(x)
        loss = cross_entropy(logits, y)
        if index % 2:
            loss += 0.01 * sum(param.pow(2).sum() for param in model.parameters())
        if index % 4 == 0:
            kept.append(logits)
        del logits
        loss.backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        losses.append(loss.item())
    return [*losses, *(logits.detach().sum() for logits in kept)]


def has_other_shapes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for index in range(20):
        size = 8 if index % 4 else 5
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(size, 4)), torch.arange(size) % 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def works_on_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    losses = []
    for index, x, y in batches(24):
        logits = model(x)
        loss = cross_entropy(logits + torch.randn_like(logits), y)
        loss.backward()
        # Another number from some iteration on: a graph more.
        nn.utils.clip_grad_value_(model.parameters(), 0.01 if index < 12 else 0.02)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()
        losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            losses.append(cross_entropy(model(x), y))
        model.train()
    return losses


def copies_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    average = copy.deepcopy(model)
    losses = []
    for _, x, y in batches(9):
        guide = average(x).detach()
        loss = cross_entropy(model(x), y) + mse_loss(model(x), guide)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
        losses.append(loss.item())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [*losses, loaded.eval()(torch.ones(2, 4)).detach().sum()]


def fails_by_itself(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for index, x, y in batches(16):
        optimizer.zero_grad()
        try:
            loss = cross_entropy(model(x), y)
            if index in (6, 9, 12):
                raise KeyError("the user's")
            loss.backward()
            optimizer.step()
        except KeyError:
            if index == 12:
                losses.append(next(model.parameters()).norm().item())
        if index in (6, 9):
            model.eval()
            with torch.no_grad():
                losses.append(model(x).sum().item())
            assert _get_current_function_mode() is None
            model.train()
        else:
            losses.append(loss.item())
    return losses


def casts_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for _, x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
            with torch.autocast("cpu", enabled=False):
                loss = loss + model(x).mean()
            loss = loss + cross_entropy(model(x), y)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss + cross_entropy(model(x.flip(0)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def looks_at_views(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for index, x, y in batches():
        logits = model(x)
        flat, last, turned, alone = logits.view(-1), logits[:, -1], logits.t(), logits.detach()
        loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            alone.mul_(2)
            flat[5] = 7
            losses += [logits[1, 2].item(), turned[2, 1].item(), last.sum(), turned.sum()]
        if index % 3 == 0:
            del logits
    return losses


def adds_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses: list[Any] = []
    for epoch in range(3):
        total: Any = 0
        mean = torch.zeros(2)
        sign = torch.ones(())
        for _, x, y in batches(5):
            loss = cross_entropy(model(x) + sign, y)
            total += loss.detach()
            mean.add_(loss.detach()).mul_(0.5)
            if epoch == 2:
                total /= 2
            sign.fill_(-1.0)
            (loss + cross_entropy(model(x) + sign * torch.eye(3)[0], y)).backward()
            sign.fill_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(total), mean[1].item()]
    return losses


def fails_in_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = accumulates(model, optimizer)
    loss = model(torch.ones(8, 4)).sum()
    with pytest.raises(RuntimeError):
        (loss * torch.ones(2) @ torch.ones(3)).backward()
    del loss
    optimizer.zero_grad()
    return [*losses, *has_other_shapes(model, optimizer)]


def trains_an_actor(critic: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """An actor that is trained through the model, less often and outside of the graph."""
    actor = nn.Linear(4, 4)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-2)
    losses = []
    for index, x, y in batches(20):
        loss = cross_entropy(critic(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if index % 2:
            loss = critic(actor(x)).mean()
            of_actor.zero_grad()
            loss.backward()
            of_actor.step()
            losses += [loss.item(), actor.weight.norm().item()]
    return losses


@dataclass
class Pair:
    first: Tensor
    second: Tensor


class OfPairs(nn.Module):
    """Takes and returns what torch's trees do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, batch: Pair) -> Pair:
        logits = self.net(batch.first)
        return Pair(logits, cross_entropy(logits, batch.second))


def make_adam_of_a_factor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.tensor(1.5))], lr=1e-2)


def takes_pairs(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    factor = optimizer.param_groups[0]["params"][-1]  # of no module
    losses = []
    for _, x, y in batches():
        pair = model(Pair(x, y))
        loss = pair.second * factor.exp()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), pair.first.sum().item(), factor.item()]
    return losses


def make_pair() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    ]


def make_adams(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]


def is_adversarial(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    (generator, critic), (of_generator, of_critic) = models, optimizers
    losses = []
    for _ in range(9):
        real, noise = torch.randn(8, 4), torch.randn(8, 2)
        critic.zero_grad()
        on_real = softplus(-critic(real)).mean()
        on_real.backward()
        fake = generator(noise)
        on_fake = softplus(critic(fake.detach())).mean()
        on_fake.backward()
        of_critic.step()
        generator.zero_grad()
        loss = softplus(-critic(fake)).mean()
        loss.backward()
        of_generator.step()
        losses += [on_real.item(), on_fake.item(), loss.item()]
    return losses


def trains_in_turns(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Each is frozen while the other one steps, and gradients are taken off one by one."""
    (generator, critic), (of_generator, of_critic) = models, optimizers
    losses = []
    for index in range(24):
        real, noise = torch.randn(8, 4), torch.randn(8, 2)
        critic.requires_grad_(False)
        # Trained behind this point in every iteration, and here in some.
        next(generator.parameters()).requires_grad_(index < 12)
        loss = softplus(-critic(generator(noise))).mean()
        for param in generator.parameters():
            param.grad = None
        loss.backward()
        of_generator.step()
        was = [param.requires_grad for param in generator.parameters()]
        for param in generator.parameters():
            param.requires_grad = False
        critic.requires_grad_(True)
        gap = softplus(critic(generator(noise))).mean() + softplus(-critic(real)).mean()
        torch.optim.Optimizer.zero_grad(of_critic)
        gap.backward()
        of_critic.step()
        for param, flag in zip(generator.parameters(), was, strict=True):
            param.requires_grad_(flag)
        losses += [loss.item(), gap.item(), *was]
    return losses


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "dataclasses, a parameter of no module": (
        takes_pairs,
        {"make": OfPairs, "optim": make_adam_of_a_factor},
    ),
    "a model that is trained through it": (trains_an_actor, {}),
    "accumulation, clipping": (accumulates, {}),
    "batches that are left over": (leaves_some_over, {"make": lambda: make_net(0.0)}),
    "a closure": (steps_with_a_closure, {}),
    "autocast, accuracy": (casts, {}),
    "two ways, kept outputs": (goes_two_ways, {}),
    "another shape": (has_other_shapes, {}),
    "gradients by hand, schedule, evaluation": (works_on_gradients, {}),
    "autograd.grad, copies": (copies_the_model, {"make": lambda: make_net(0.0)}),
    "an exception in between": (fails_in_between, {}),
    "an exception of the loop": (fails_by_itself, {}),
    "autocast, twice": (casts_twice, {}),
    "views of outputs": (looks_at_views, {}),
    "running sums": (adds_up, {}),
    "two models and optimizers": (is_adversarial, {"make": make_pair, "optim": make_adams}),
    "frozen in turns": (trains_in_turns, {"make": make_pair, "optim": make_adams}),
    "FusedAdam": (
        has_other_shapes,
        {"optim": lambda model: FusedAdam(model.parameters(), lr=1e-2)},
    ),
}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 3 * ctx.saved_tensors[0]


def squared(x: Tensor) -> Tensor:
    found: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return found


def loop_with(
    between: Callable[[Tensor, Tensor, int], Tensor] = lambda logits, y, _: cross_entropy(
        logits, y
    ),
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    zero: Callable[[Any, Any], object] = lambda _, optimizer: optimizer.zero_grad(),
) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        for index, x, y in batches(12):
            loss = between(call(model, x), y, index)
            loss.backward()
            optimizer.step()
            zero(model, optimizer)
        return []

    return loop


def reads(logits: Tensor, y: Tensor, index: int) -> Tensor:
    loss = cross_entropy(logits, y)
    return loss if loss.item() < 1e9 else 2 * loss


def prints_a_gradient(logits: Tensor, y: Tensor, index: int) -> Tensor:
    logits.register_hook(print)  # which autograd calls outside of all lines
    return cross_entropy(logits, y)


TOTALS = torch.zeros(2)


def adds_to_a_view(logits: Tensor, y: Tensor, index: int) -> Tensor:
    loss = cross_entropy(logits, y)
    TOTALS[0].add_(loss.detach())
    return loss


def in_a_context(model: nn.Module, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        logits: Tensor = model(x)
    return logits


def looked_at_in_between(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return logits


JUDGED: dict[str, tuple[Loop, str]] = {
    "a read": (loop_with(reads), "host-read"),
    "a print in a backward pass": (loop_with(prints_a_gradient), "host-read"),
    "a validation": (
        loop_with(
            lambda logits, y, _: -Categorical(logits=logits, validate_args=True).log_prob(y).mean()
        ),
        "host-read",
    ),
    "no zero_grad": (loop_with(zero=lambda *_: None), "state"),
    "zero_grad of a part": (loop_with(zero=lambda model, _: model[0].zero_grad()), "state"),
    "a number new in each iteration": (
        loop_with(lambda logits, y, index: cross_entropy(logits, y) * (1 + index)),
        "baked-number",
    ),
    "a draw": (loop_with(lambda logits, y, _: cross_entropy(logits + torch.randn(8, 3), y)), ""),
    "a sum in a view": (loop_with(adds_to_a_view), ""),
    "an autograd.Function": (loop_with(lambda logits, y, _: squared(logits).mean()), ""),
    "a context around the model": (loop_with(call=in_a_context), ""),
    "a switch of torch's around the model": (
        loop_with(call=sdpa_kernel(SDPBackend.MATH)(lambda model, x: model(x))),
        "",
    ),
    "another mode in between": (loop_with(call=looked_at_in_between), ""),
    "a model before it": (loop_with(call=lambda model, x: model(nn.Linear(4, 4)(x))), ""),
}

if __name__ == "__main__":  # as `graphfsdp check` runs it
    name = sys.argv[1]
    loop, options = LOOPS[name] if name in LOOPS else (JUDGED[name][0], {})
    net = options.get("make", make_net)()
    adam = options.get("optim", make_adam)(net)
    torch.manual_seed(7)
    loop(net, adam)
