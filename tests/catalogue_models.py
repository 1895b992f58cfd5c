"""Odd modules, hooks, batches, outputs and schedules that a graph can hold."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from catalogue import ROWS, WIDTH, Net, Odd, mean_square
from helpers import Batch


def plain(net: Any, x: Tensor) -> Tensor:
    return mean_square(net.second(net.first(x).tanh()))


def net_with(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a maker of the plain net with a change, such as hooks."""

    def make() -> nn.Module:
        net = Net(plain)
        change(net)
        return net

    return make


class Tied(nn.Module):
    """Embedding and head share a weight; a slice of it is shared storage for a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(self.embed(ids))), ids)


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


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class OddParameters(nn.Module):
    """Parameters of odd forms: scalar, empty, transposed, in a list and a dict, unused, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(2, WIDTH).t())
        self.listed = nn.ParameterList([torch.randn(WIDTH), torch.randn(1)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scalar * self.frozen + self.listed[0] * self.listed[1]
        return (
            mean_square(h @ self.transposed) + mean_square(self.named["a"] * h) + self.empty.sum()
        )


class KeptActivations(nn.Module):
    """Keeps what it computed, counts in Python, and re-uses the kept one in the same pass."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept = self.layer(x).detach()
        return mean_square(self.layer(x) - 0.5 * self.kept)


@dataclasses.dataclass
class Output:
    """What a model returns; not a pytree."""

    loss: Tensor
    hidden: tuple[Tensor, ...]


class DataclassModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        h = self.layer(x)
        return Output(mean_square(h), (h, x))


class Pair(NamedTuple):
    """Part of a batch."""

    x: Tensor
    scale: Tensor


def nested_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(ROWS, WIDTH, generator=generator)
    scale = torch.rand(ROWS, 1, generator=generator)
    nested = {"pair": Pair(x, scale), "list": [x.flip(0), (None, 3, "mean")]}
    return Batch((OrderedDict(nested), ()), {"mask": x > 0, "extra": {}})


def nested_loss(model: Any, batch: Any, nothing: Any, *, mask: Tensor, extra: Any) -> Any:
    pair, (other, (_, power, reduction)) = batch["pair"], batch["list"]
    assert reduction == "mean"
    h = model.first(pair.x * pair.scale).masked_fill(mask, 0.0) + model.second(other)
    return h.pow(2).mean() * power, {"hidden": [h, (h.sum(dim=0),)], "none": None}


def strided_batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(WIDTH, 2 * ROWS, generator=generator).t()[::2],))


def aliasing_outputs(model: Any, x: Tensor) -> Any:
    h = model.first(x)
    loss = mean_square(model.second(h))
    return loss, (h, h[0], h.t(), model.first.weight, x, loss, h.expand(2, *h.shape))


def half_batch(generator: torch.Generator) -> Batch:
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return Batch((x.half(), x.to(torch.complex64), (x * 10).to(torch.int8), x.double()))


def mixed_dtypes(model: Any, half: Tensor, spin: Tensor, small: Tensor, double: Tensor) -> Tensor:
    x = half.float() + spin.imag + small + double.float()
    return mean_square(model.second(model.first(x)))


def under_autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = model.first(x)
        with torch.autocast(x.device.type, enabled=False):
            h = model.second(h.float())
    return mean_square(h)


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


def hooks_that_keep(net: Any) -> None:
    net.kept = {}
    net.first.register_forward_hook(lambda m, args, out: net.kept.update(h=out.detach()))


def step_hooks(net: nn.Module, optim: torch.optim.Optimizer) -> None:
    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        torch._foreach_clamp_max_([p.grad for p in net.parameters() if p.grad is not None], 0.05)

    optim.register_step_pre_hook(clip)

    def bound(optimizer: Any, args: Any, kwargs: Any) -> None:
        torch._foreach_clamp_max_([p.data for p in net.parameters()], 2.0)

    optim.register_step_post_hook(bound)


def exponential(net: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], object]:
    return torch.optim.lr_scheduler.ExponentialLR(optim, 0.9).step


def chained(net: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], object]:
    warm = torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 20)
    return torch.optim.lr_scheduler.SequentialLR(optim, [warm, cosine], [5]).step


def averaged(net: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], object]:
    average = torch.optim.swa_utils.AveragedModel(net)
    return lambda: average.update_parameters(net)


def noisy_weights(net: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], object]:
    """Somebody writes the weights in place between two calls."""

    def disturb() -> None:
        with torch.no_grad():
            for param in net.parameters():
                param.add_(torch.randn_like(param), alpha=0.01)

    return disturb


def ids(generator: torch.Generator) -> Batch:
    return Batch((torch.randint(0, 7, (ROWS,), generator=generator),))


def normalized(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net(plain)
        if kind == "spectral":
            parametrizations.spectral_norm(net.first)
        elif kind == "weight":
            parametrizations.weight_norm(net.first)
        elif kind == "orthogonal":
            parametrizations.orthogonal(net.first, orthogonal_map="cayley")
        else:
            parametrize.register_parametrization(net.first, "weight", Symmetric())
            parametrize.register_parametrization(net.first, "weight", nn.Tanh())
        return net

    return make


def old_spectral_norm() -> nn.Module:
    net = Net(plain)
    nn.utils.spectral_norm(net.second)
    return net


def cached_parametrization(model: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return mean_square(model.second(model.first(x)) + model.first(x))


def default_batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(ROWS, WIDTH, generator=generator),))


MODELS: dict[str, Odd] = {
    "tied": Odd(Tied, batch=ids),
    "shared_storage": Odd(SharedStorage),
    "odd_parameters": Odd(OddParameters),
    "kept_activations": Odd(KeptActivations),
    "dataclass_output": Odd(DataclassModel),
    "nested_batch": Odd(net_with(lambda net: None), nested_loss, nested_batch),
    "strided_batch": Odd(net_with(lambda net: None), batch=strided_batch),
    "aliasing_outputs": Odd(net_with(lambda net: None), aliasing_outputs),
    "mixed_dtypes": Odd(net_with(lambda net: None), mixed_dtypes, half_batch),
    "autocast_inside": Odd(net_with(lambda net: None), under_autocast),
    "hooks_on_modules": Odd(net_with(hooks_on_modules)),
    "hooks_on_parameters": Odd(net_with(hooks_on_parameters)),
    "hooks_that_keep": Odd(net_with(hooks_that_keep)),
    "step_hooks": Odd(net_with(lambda net: None), setup=step_hooks),
    "step_hooks_of_sgd": Odd(net_with(lambda net: None), setup=step_hooks, optimizer="sgd"),
    "exponential_lr": Odd(net_with(lambda net: None), setup=exponential),
    "chained_lr": Odd(net_with(lambda net: None), setup=chained),
    "averaged_model": Odd(net_with(lambda net: None), setup=averaged, optimizer="adamw"),
    "written_weights": Odd(net_with(lambda net: None), setup=noisy_weights),
    "spectral_norm": Odd(normalized("spectral")),
    "weight_norm": Odd(normalized("weight")),
    "orthogonal": Odd(normalized("orthogonal")),
    "two_parametrizations": Odd(normalized("both")),
    "cached_parametrization": Odd(normalized("both"), cached_parametrization),
    "old_spectral_norm": Odd(old_spectral_norm),
}
