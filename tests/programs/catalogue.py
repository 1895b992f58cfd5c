"""Odd training programs that a graph can hold: models, batches, loss functions, set-ups."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional

from helpers import Batch, Case

WIDTH = 4
ROWS = 6


def default_batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(ROWS, WIDTH, generator=generator),))


class Net(nn.Module):
    """Two layers and whatever a program registers; the program is its forward."""

    def __init__(self, program: Callable[["Net", Tensor], Any], **buffers: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.program = program
        self.generator = torch.Generator().manual_seed(4)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.program(self, x)
        return loss


def odd(program: Callable[[Any, Tensor], Any], **buffers: Tensor) -> Case:
    """Return the case of a program over two linear layers and buffers."""

    def make() -> nn.Module:
        return Net(program, **{name: buffer.clone() for name, buffer in buffers.items()})

    return Case(make, default_batch)


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


# In-place operators, views, aliases.


def write_through_a_view(net: Any, x: Tensor) -> Any:
    h = net.first(x) + 0
    middle = h[1:5].view(2, 2, WIDTH)[1]
    middle.mul_(2)
    middle[:, ::2] = 0.5
    return mean_square(net.second(h)) + middle.sum()


def diagonal_write(net: Any, x: Tensor) -> Any:
    square = (net.first(x).t() @ x).clone()
    square.diagonal().fill_(0.25)
    square.as_strided((2, 2), (1, WIDTH), 2).add_(0.125)
    return mean_square(net.second(square))


def out_arguments(net: Any, x: Tensor) -> Any:
    scratch = torch.empty(ROWS, WIDTH)
    with torch.no_grad():
        torch.mul(x, 2.0, out=scratch)
        torch.add(scratch, 1.0, out=scratch)
    return mean_square(net.first(x) * scratch)


def zero_sized(net: Any, x: Tensor) -> Any:
    none = net.first(x[:0])
    joined = torch.cat([none, net.second(x), net.empty.expand(0, WIDTH)])
    return mean_square(joined) + none.sum() + net.empty.sum()


def complex_numbers(net: Any, x: Tensor) -> Any:
    spectrum = torch.fft.rfft(net.first(x)) * net.phase
    back = torch.fft.irfft(spectrum.conj(), n=WIDTH) + torch.view_as_real(spectrum).sum()
    return mean_square(net.second(back)) + (spectrum.abs() ** 2).mean()


def integer_state(net: Any, x: Tensor) -> Any:
    net.seen.add_(x.shape[0])
    net.histogram.scatter_add_(0, x.argmax(dim=1), torch.ones(ROWS, dtype=torch.int64))
    net.flags.logical_xor_(x[0] > 0)
    return mean_square(net.first(x) * net.flags) + net.second(x).mean() / net.seen


def named_generators(net: Any, x: Tensor) -> Any:
    noise = torch.randn(ROWS, WIDTH, generator=net.generator)
    mask = torch.bernoulli(torch.full((WIDTH,), 0.5))
    return mean_square(net.first(x) + noise * mask + functional.gumbel_softmax(net.second(x)))


def random_of_many_kinds(net: Any, x: Tensor) -> Any:
    h = net.first(x)
    h = h + torch.empty_like(h).exponential_() + torch.zeros_like(h).normal_(0, 0.1).uniform_(-1, 1)
    h = functional.alpha_dropout(functional.feature_alpha_dropout(h, 0.1), 0.2)
    return mean_square(net.second(functional.rrelu(h, training=True))[torch.randperm(ROWS)])


# torch.func and double backward.


def per_sample_gradients(net: Any, x: Tensor) -> Any:
    params = dict(net.first.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return mean_square(functional_call(net.first, weights, (row,)))

    grads = vmap(grad(loss), in_dims=(None, 0))(params, x)
    return mean_square(net.second(x)) + 0.1 * sum(mean_square(g) for g in grads.values())


def forward_mode(net: Any, x: Tensor) -> Any:
    both: Any = jvp(lambda y: net.first(y).tanh(), (x,), (torch.ones_like(x),))
    value, tangent = both
    return mean_square(value) + mean_square(tangent) + net.second(x).mean()


def inner_step(net: Any, x: Tensor) -> Any:
    """One step of gradient descent inside the forward pass (MAML)."""
    names = dict(net.first.named_parameters())
    loss = mean_square(functional_call(net.first, names, (x,)))
    grads = torch.autograd.grad(loss, list(names.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(names.items(), grads, strict=True)}
    return mean_square(net.second(functional_call(net.first, moved, (x,))))


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is a tenth, with saved tensors and a mutated context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.factor = 0.1
        twice = x * 2
        ctx.mark_non_differentiable(twice)
        return x * weight, twice

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return ctx.factor * grad_out * weight, (grad_out * x).sum(dim=0)


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3.0)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        return grad_out * 3.0


def custom_functions(net: Any, x: Tensor) -> Any:
    scale: Any = ScaledGradient.apply
    triple: Any = InPlaceFunction.apply
    h, other = scale(net.first(x), net.second.bias)
    return mean_square(net.second(triple(h + 0))) + other.mean()


def saved_tensor_hooks(net: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        h = net.first(x).tanh()
    return mean_square(net.second(h))


def activation_hooks(net: Any, x: Tensor) -> Any:
    h = net.first(x)
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    h.retain_grad()
    return mean_square(net.second(h))


PROGRAMS: dict[str, Case] = {
    "write_through_a_view": odd(write_through_a_view),
    "diagonal_write": odd(diagonal_write),
    "out_arguments": odd(out_arguments),
    "zero_sized": odd(zero_sized, empty=torch.zeros(0, 1)),
    "complex_numbers": odd(complex_numbers, phase=torch.tensor([1 + 1j, 0.5j, -1 + 0j])),
    "integer_state": odd(
        integer_state,
        seen=torch.tensor(1),
        histogram=torch.zeros(WIDTH, dtype=torch.int64),
        flags=torch.ones(WIDTH, dtype=torch.bool),
    ),
    "named_generators": odd(named_generators),
    "random_of_many_kinds": odd(random_of_many_kinds),
    "per_sample_gradients": odd(per_sample_gradients),
    "forward_mode": odd(forward_mode),
    "inner_step": odd(inner_step),
    "custom_functions": odd(custom_functions),
    "saved_tensor_hooks": odd(saved_tensor_hooks),
    "activation_hooks": odd(activation_hooks),
}
