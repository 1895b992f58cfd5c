"""Loops that train two models against each other, as they are written without capture."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus


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
