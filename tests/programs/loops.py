"""Training loops as people write them, to be run with capture and without."""

import copy
import io
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, softplus

from graphfsdp.optim import FusedAdam
from parts_helpers import Loop, batches, make_adam, make_net, trains_by


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _ in range(9):
        for part in range(4):
            loss = cross_entropy(model(torch.ones(8, 6) * part), torch.arange(8) % 4) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def leaves_some_over(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """An epoch's last batches belong to the next one's first step, with validation between."""
    for epoch in range(4):
        model.train()
        for index, x, y in batches(11):
            loss = cross_entropy(model(x), y) / 4
            loss.backward()
            if (index + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                yield loss.item()
        model.eval()
        with torch.no_grad() if epoch % 2 else torch.inference_mode():
            yield cross_entropy(model(x), y).item()


def steps_with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        yield loss.item()


def goes_two_ways(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    kept = []
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
        yield loss.item()
    for logits in kept:
        yield logits.sum()


def has_other_shapes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index in range(20):
        size = 8 if index % 4 else 5
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(size, 6)), torch.arange(size) % 4)
        loss.backward()
        optimizer.step()
        yield loss.item()


def works_on_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
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
        yield loss
        model.eval()
        with torch.no_grad():
            yield cross_entropy(model(x), y)
        model.train()


def copies_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    average = copy.deepcopy(model)
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
        yield loss.item()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    yield loaded.eval()(torch.ones(2, 6)).sum()


def casts_twice(model: nn.Module, _: int, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x), y)
        with torch.autocast("cpu", enabled=False):
            loss = loss + model(x).mean()
        loss = loss + cross_entropy(model(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        return loss + cross_entropy(model(x.flip(0)), y)


def make_pair() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    ]


def make_adams(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]


def is_adversarial(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> Iterator[Any]:
    (generator, critic), (of_generator, of_critic) = models, optimizers
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
        yield from (each.item() for each in (on_real, on_fake, loss))


def trains_in_turns(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> Iterator[Any]:
    """Each is frozen while the other one steps, and gradients are taken off one by one."""
    (generator, critic), (of_generator, of_critic) = models, optimizers
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
        yield from (loss.item(), gap.item(), *was)


def in_a_context(model: nn.Module, _: int, x: Tensor, y: Tensor) -> Tensor:
    with torch.device("cpu"):
        logits = model(x)
    return cross_entropy(logits, y)


def looks_in_between(model: nn.Module, _: int, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return cross_entropy(logits, y)


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "accumulation, clipping": (accumulates, {}),
    "batches that are left over": (leaves_some_over, {}),
    "a closure": (steps_with_a_closure, {}),
    "two ways, kept outputs": (goes_two_ways, {}),
    "another shape": (has_other_shapes, {}),
    "gradients by hand, schedule, evaluation": (works_on_gradients, {}),
    "autograd.grad, copies": (copies_the_model, {}),
    "autocast, twice": (trains_by(casts_twice), {}),
    "two models and optimizers": (is_adversarial, {"make": make_pair, "optim": make_adams}),
    "frozen in turns": (trains_in_turns, {"make": make_pair, "optim": make_adams}),
    "FusedAdam": (
        has_other_shapes,
        {"optim": lambda model: FusedAdam(model.parameters(), lr=1e-2)},
    ),
    "a context around the model": (trains_by(in_a_context), {}),
    "another mode in between": (trains_by(looks_in_between), {}),
}

if __name__ == "__main__":  # as `graphfsdp check` runs it
    name = sys.argv[1]
    loop, options = LOOPS[name]
    net = options.get("make", make_net)()
    adam = options.get("optim", make_adam)(net)
    torch.manual_seed(7)
    for _ in loop(net, adam):
        pass
