"""Odd training programs that a graph can hold: models, hooks, batches, outputs, schedules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional
from torch.nn.utils import parametrize

from helpers import Batch, Case

WIDTH = 4
ROWS = 6


def default_batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(ROWS, WIDTH, generator=generator),))


class Net(nn.Module):
    """Two layers; the program is its forward."""

    def __init__(self, program: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.program = program
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.program(self, x)
        return loss


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def out_arguments(net: Any, x: Tensor) -> Any:
    scratch = torch.empty(ROWS, WIDTH)
    with torch.no_grad():
        torch.mul(x, 2.0, out=scratch)
        torch.add(scratch, 1.0, out=scratch)
    return mean_square(net.first(x) * scratch)


def random_of_many_kinds(net: Any, x: Tensor) -> Any:
    noise = torch.randn(ROWS, WIDTH, generator=net.generator)
    h = net.first(x) + noise * torch.bernoulli(torch.full((WIDTH,), 0.5))
    h = h + torch.empty_like(h).exponential_() + torch.zeros_like(h).normal_(0, 0.1).uniform_(-1, 1)
    h = functional.alpha_dropout(functional.feature_alpha_dropout(h, 0.1), 0.2)
    h = functional.gumbel_softmax(functional.rrelu(h, training=True))
    return mean_square(net.second(h)[torch.randperm(ROWS)])


def forward_mode(net: Any, x: Tensor) -> Any:
    both: Any = jvp(lambda y: net.first(y).tanh(), (x,), (torch.ones_like(x),))
    value, tangent = both
    return mean_square(value) + mean_square(tangent) + net.second(x).mean()


def saved_tensor_hooks(net: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        h = net.first(x).tanh()
    return mean_square(net.second(h))


def activation_hooks(net: Any, x: Tensor) -> Any:
    h = net.first(x)
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    h.retain_grad()
    return mean_square(net.second(h))


def plain(net: Any, x: Tensor) -> Tensor:
    return mean_square(net.second(net.first(x).tanh()))


def net_with(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a maker of the plain net with a change, such as hooks."""

    def make() -> nn.Module:
        net = Net(plain)
        change(net)
        return net

    return make


class SharedStorage(nn.Module):
    """Two parameters are views of one storage, and so is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.linspace(-1, 1, 3 * WIDTH)
        self.low = nn.Parameter(storage[:WIDTH])
        self.high = nn.Parameter(storage[WIDTH : 2 * WIDTH])
        self.register_buffer("rest", storage[2 * WIDTH :])

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.rest, Tensor)
        self.rest.add_(0.01)
        return mean_square(x * self.low + self.high * self.rest)


def of_sequences(generator: torch.Generator) -> Batch:
    x = torch.randn(12, 2, 6, generator=generator)
    return Batch((x, torch.randint(1, 5, (2, 4), generator=generator)))


def ctc_loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Has lengths that never change, as numbers and as tensors."""
    scores = model(x).log_softmax(dim=-1)
    as_numbers = torch.ctc_loss(scores, targets, (12, 12), (4, 4), reduction=1)
    as_tensors = functional.ctc_loss(scores, targets, torch.full((2,), 12), torch.full((2,), 3))
    return as_numbers + as_tensors


class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([12, 7]))
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
        loss: Tensor = output.square().mean() + packed.data.mean()
        return loss


def hooks_on_modules(net: Any) -> None:
    net.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
    net.first.register_forward_hook(lambda m, args, out: out + 0.1)
    net.second.register_forward_hook(
        lambda m, args, kwargs, out: out * 0.9, with_kwargs=True, always_call=True
    )
    net.second.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 0.5,))
    net.second.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 2,))


def hooks_on_parameters(net: Any) -> None:
    net.first.weight.register_hook(lambda g: g * 0.5)
    net.first.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def shrink(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.1)

    net.second.bias.register_post_accumulate_grad_hook(shrink)


def step_hooks(net: nn.Module, optim: torch.optim.Optimizer) -> None:
    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        torch._foreach_clamp_max_([p.grad for p in net.parameters() if p.grad is not None], 0.05)

    optim.register_step_pre_hook(clip)

    def bound(optimizer: Any, args: Any, kwargs: Any) -> None:
        torch._foreach_clamp_max_([p.data for p in net.parameters()], 2.0)

    optim.register_step_post_hook(bound)


def symmetric(net: Any) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    parametrize.register_parametrization(net.first, "weight", Symmetric())
    parametrize.register_parametrization(net.first, "weight", nn.Tanh())


def cached_parametrization(model: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return mean_square(model.second(model.first(x)) + model.first(x))


CATALOGUE: dict[str, Case] = {
    **{
        program.__name__: Case(partial(Net, program), default_batch)
        for program in (
            *(out_arguments, random_of_many_kinds, forward_mode),
            *(saved_tensor_hooks, activation_hooks),
        )
    },
    "shared_storage": Case(SharedStorage, default_batch),
    "ctc": Case(lambda: nn.Linear(6, 5), of_sequences, ctc_loss),
    "packed": Case(PackedLSTM, of_sequences),
    "hooks_on_modules": Case(net_with(hooks_on_modules), default_batch),
    "hooks_on_parameters": Case(net_with(hooks_on_parameters), default_batch),
    "step_hooks": Case(partial(Net, plain), default_batch, setup=step_hooks),
    "cached_parametrization": Case(net_with(symmetric), default_batch, cached_parametrization),
    "old_spectral_norm": Case(
        net_with(lambda net: nn.utils.spectral_norm(net.second)), default_batch
    ),
}
