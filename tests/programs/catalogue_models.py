"""Odd modules, hooks, batches, outputs and schedules that a graph can hold."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from catalogue import ROWS, WIDTH, Net, default_batch, mean_square
from helpers import Batch, Case


def plain(net: Any, x: Tensor) -> Tensor:
    return mean_square(net.second(net.first(x).tanh()))


def net_with(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a maker of the plain net with a change, such as hooks."""

    def make() -> nn.Module:
        net = Net(plain)
        change(net)
        return net

    return make


def plain_net() -> nn.Module:
    return Net(plain)


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
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class KeptActivations(nn.Module):
    """Keeps what it computed, counts in Python, and reuses the kept one in the same pass."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept = self.layer(x).detach()
        return mean_square(self.layer(x) - 0.5 * self.kept)


class Wrapped(torch.Tensor):
    """A tensor subclass that handles operators itself, as DTensor does."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        result = func(*(unwrap(arg) for arg in args), **(kwargs or {}))
        return Wrapped(result) if isinstance(result, Tensor) else result


class WithWrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = Wrapped(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).detach() * self.scale
        assert isinstance(hidden, Wrapped)
        loss: Tensor = (self.layer(x) * hidden.inner).square().mean()
        self.scale.inner.mul_(1.01)
        return loss


class Pair(NamedTuple):
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


def aliasing_outputs(model: Any, x: Tensor) -> Any:
    h = model.first(x)
    loss = mean_square(model.second(h))
    return loss, (h, h[0], h.t(), model.first.weight, x, loss, h.expand(2, *h.shape))


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


def normalized(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net(plain)
        if kind == "orthogonal":
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


MODELS: dict[str, Case] = {
    "shared_storage": Case(SharedStorage, default_batch),
    "kept_activations": Case(KeptActivations, default_batch),
    "wrapper_subclass": Case(WithWrapper, default_batch),
    "ctc": Case(lambda: nn.Linear(6, 5), of_sequences, ctc_loss),
    "packed": Case(PackedLSTM, of_sequences),
    "nested_batch": Case(plain_net, nested_batch, nested_loss),
    "aliasing_outputs": Case(plain_net, default_batch, aliasing_outputs),
    "hooks_on_modules": Case(net_with(hooks_on_modules), default_batch),
    "hooks_on_parameters": Case(net_with(hooks_on_parameters), default_batch),
    "step_hooks": Case(plain_net, default_batch, setup=step_hooks),
    "averaged_model": Case(plain_net, default_batch, setup=averaged),
    "written_weights": Case(plain_net, default_batch, setup=noisy_weights),
    "orthogonal": Case(normalized("orthogonal"), default_batch),
    "cached_parametrization": Case(normalized("both"), default_batch, cached_parametrization),
    "old_spectral_norm": Case(old_spectral_norm, default_batch),
}
