"""Whole iterations of users' own, for ``iteration=``: several models, backwards and optimizers.

Each has its nets; a test says where they lie, how they are cut, and what steps.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphfsdp
from counting_net import mean_square
from helpers import set_lr

Optimizer = torch.optim.Optimizer


def steps_once(
    loss_fn: Callable[..., Tensor] = mean_square, behind: Callable[[], object] = lambda: None
) -> Callable[..., Tensor]:
    """Return an iteration as ``capture`` has it by default, with something behind the step."""

    def iterate(model: nn.Module, optimizer: Optimizer, *batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        behind()
        return loss.detach()

    return iterate


def gan(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], real: Tensor) -> Any:
    """Two models, two optimizers, two backwards; the critic gets gradients of the other's loss."""
    net, critic = models
    bce = nn.functional.binary_cross_entropy_with_logits
    optimizers[1].zero_grad()
    fake = net(torch.randn(len(real), 4, device=real.device))
    on_real, on_fake = critic(real), critic(fake.detach())
    critic_loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
    critic_loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    out = critic(fake)
    loss = bce(out, torch.ones_like(out))
    loss.backward()
    optimizers[0].step()
    return {"net": loss, "critic": critic_loss}


def gradient_penalty(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], real: Tensor
) -> Tensor:
    """WGAN-GP's critic: a gradient of a gradient, two critic steps for one of the generator."""
    net, critic = models
    for _ in range(2):
        optimizers[1].zero_grad(set_to_none=False)
        fake = net(torch.randn(len(real), 4, device=real.device)).detach()
        mix = torch.rand(len(real), 1, device=real.device)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss: Tensor = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        graphfsdp.clip_grad_norm_(critic, 1.0)
        optimizers[1].step()
    for param in critic.parameters():
        param.requires_grad_(False)
    optimizers[0].zero_grad()
    (-critic(net(torch.randn(len(real), 4, device=real.device))).mean()).backward()
    optimizers[0].step()
    for param in critic.parameters():
        param.requires_grad_(True)
    return loss


def moving_average(
    models: Sequence[nn.Module], optimizer: Optimizer, real: Tensor
) -> tuple[Tensor, None]:
    """Two backwards add up; then averaged weights follow, as in self-supervised training."""
    student, teacher = models
    noise = torch.randn(len(real), 4, device=real.device)
    with torch.no_grad():
        target = teacher(noise)
    optimizer.zero_grad()
    first = (student(noise) - target).square().mean()
    first.backward()
    second = (student(noise) - real).square().mean()
    second.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, yours in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(yours, 0.01)
    return first + second, None


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.dropout(torch.tanh(self.up(x))))
        return out


class Net(nn.Sequential):
    """Two residual blocks between two layers."""

    def __init__(self, num_in: int, num_out: int, dropout: float = 0.0) -> None:
        width = 7
        blocks = [Residual(width, dropout), Residual(width, dropout)]
        super().__init__(nn.Linear(num_in, width), *blocks, nn.Linear(width, num_out))


def two_nets() -> list[nn.Module]:
    return [Net(4, 6), Net(6, 1, dropout=0.2)]


def student_and_teacher() -> list[nn.Module]:
    return [Net(4, 6, dropout=0.2), Net(4, 6).requires_grad_(False)]


ITERATIONS: dict[str, tuple[Callable[..., Any], Callable[[], list[nn.Module]]]] = {
    "gan": (gan, two_nets),
    "gradient_penalty": (gradient_penalty, two_nets),
    "moving_average": (moving_average, student_and_teacher),
}


def make_trained(
    name: str,
    device: torch.device,
    *make: Callable[[nn.Module], Optimizer],
    shard: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[list[nn.Module], Any]:
    """Return models, and an optimizer for each that is trained, or only one."""
    torch.manual_seed(0)
    models = [model.to(device) for model in ITERATIONS[name][1]()]
    for model in models:
        shard(model)
    trained = [model for model in models if next(model.parameters()).requires_grad]
    optimizers = [one(model) for one, model in zip(make, trained, strict=False)]
    return models, optimizers if len(optimizers) > 1 else optimizers[0]


def train_by(
    name: str,
    models: list[nn.Module],
    optimizers: Any,
    batches: Iterable[Tensor],
    scope: str | None,
    state_of: Callable[[], dict[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """Return results and state of each iteration; with scope None of a loop without graphfsdp."""
    states = []
    iteration = ITERATIONS[name][0]
    step: Any = None
    if scope is not None:
        step = graphfsdp.capture(models, optimizers, iteration=iteration, scope=scope)
    for index, real in enumerate(batches):
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            set_lr(optimizer, 1e-2 / (1 + index))
        if step is None:
            for model in models:
                model.zero_grad()
            output = iteration(models, optimizers, real)
        else:
            output = step(real)
        results = [leaf for leaf in pytree.tree_leaves(output) if leaf is not None]
        found = {f"result {at}": leaf.detach().clone() for at, leaf in enumerate(results)}
        states.append(found | state_of())
    if step is not None:
        if scope == "full_iteration":
            assert step.report().num_calls["replay"] == len(states) - 4
        step.close()
    return states
