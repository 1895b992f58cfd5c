"""An unsharded training run in float64, and by how much float32 on several ranks may differ.

Shapes: N = sequences of the whole batch, P = positions.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helpers import NUM_STEPS, set_lr
from sharding_helpers import (
    ADAM_EPS,
    MAX_NORM,
    NUM_POSITIONS,
    NUM_SEQUENCES,
    Net,
    Training,
    batches,
    learning_rate,
)


@dataclass(frozen=True)
class Reference:
    """An unsharded run in float64 on the whole batch, and how far float32 may be away from it."""

    losses: list[float]
    norms: list[float]  # before clipping
    params: dict[str, Tensor]
    loss_bounds: list[float]
    norm_bounds: list[float]
    param_bound: float  # for every element of every parameter


def relative_rounding(model: nn.Module) -> float:
    """Return by how much float32 may change a sum of terms, relative to the sum of their sizes.

    The longest chain of roundings K behind an element of a gradient: each contraction of the
    forward pass occurs once more in the backward pass; then come the sums over sequences and
    positions, and pointwise functions. K roundings of random sign add up to at most
    lambda sqrt(K) u, where lambda = 4 fails with a probability of 2 exp(-8) at the most.

    Source: Higham and Mary 2019, "A new approach to probabilistic rounding error analysis".
    """
    contracted = sum(sum(param.shape) for param in model.parameters())
    num_roundings = 2 * contracted + NUM_SEQUENCES * NUM_POSITIONS + 16
    unit_roundoff = torch.finfo(torch.float32).eps / 2
    return 4.0 * math.sqrt(num_roundings) * unit_roundoff


@functools.cache
def reference(num_steps: int = NUM_STEPS) -> Reference:
    """Train a Net in float64 with plain PyTorch.

    With r = relative_rounding(model), and the gradients of single sequences as the terms of the
    whole gradient:

        grad_error[t]  = r max over elements of (1/N) sum over sequences |g_sequence|
        param_bound    = 2 sum over t of lr[t] (grad_error[t] / adam_eps + r max|w|)

    Adam's step m / (sqrt(v) + adam_eps) moves by at most 2 grad_error / adam_eps, of which
    the clip coefficient (at most 1) leaves no more; the other term is the decay's and the store's.
    Losses and norms are wrong by what their own sums and the weights' errors bring:

        loss_bound[t]  = r loss[t] + 4 |grad|_2 param_bound    (errors of random sign)
        norm_bound[t]  = sqrt(numel) (grad_error[t] + param_bound)
    """
    torch.manual_seed(0)
    model = Net().double()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        params.values(), lr=torch.tensor(0.02), eps=ADAM_EPS, weight_decay=0.1, foreach=False
    )
    unit = relative_rounding(model)
    numel = sum(param.numel() for param in params.values())
    losses, norms, errors = [], [], []
    param_bound = 0.0
    for index, (tokens, targets) in enumerate(batches(num_steps)):
        rate = learning_rate(index)
        set_lr(optimizer, rate)
        terms = _terms(model, tokens, targets)
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        errors.append(unit * terms)
        largest = max(float(p.detach().abs().max()) for p in params.values() if p.numel())
        param_bound += 2 * rate * (errors[-1] / ADAM_EPS + unit * largest)
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM)))
        optimizer.step()
    return Reference(
        losses=losses,
        norms=norms,
        params={name: param.detach().clone() for name, param in model.named_parameters()},
        loss_bounds=[
            unit * loss + 4 * norm * param_bound for loss, norm in zip(losses, norms, strict=True)
        ],
        norm_bounds=[numel**0.5 * (error + param_bound) for error in errors],
        param_bound=param_bound,
    )


def _terms(model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    """Return the largest element of the mean over sequences of |gradient of one sequence|."""
    params = [p for p in model.parameters() if p.requires_grad and p.numel()]
    total = [torch.zeros_like(param) for param in params]
    for index in range(len(tokens)):
        loss = model(tokens[index : index + 1], targets[index : index + 1])
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        for held, grad in zip(total, grads, strict=True):
            if grad is not None:
                held += grad.abs() / len(tokens)
    return max(held.max().item() for held in total)


def assert_close_to_reference(trainings: list[Training], expected: Reference) -> None:
    """Compare the runs of all ranks with the unsharded one, within its bounds."""
    for index, loss in enumerate(expected.losses):
        mean = sum(float(training.losses[index]) for training in trainings) / len(trainings)
        bound = expected.loss_bounds[index]
        assert abs(mean - loss) <= bound, f"call {index}: loss {mean}, expected {loss} +- {bound}"
    for rank, training in enumerate(trainings):
        for index, norm in enumerate(expected.norms):
            got, bound = float(training.norms[index]), expected.norm_bounds[index]
            assert abs(got - norm) <= bound, f"rank {rank}, call {index}: norm {got}, not {norm}"
        assert list(training.params) == list(expected.params)
        for name, whole in expected.params.items():
            got_whole = training.params[name].cpu().double()
            assert got_whole.shape == whole.shape
            difference = float((got_whole - whole).abs().max()) if whole.numel() else 0.0
            assert difference <= expected.param_bound, (
                f"rank {rank}: {name} is off by {difference}, bound {expected.param_bound}"
            )
