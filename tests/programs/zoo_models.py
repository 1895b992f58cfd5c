"""Small models of many kinds."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from graphfsdp.training.gpt import GPT, GPTConfig

WIDTH = 8
TOKENS = 6
VOCABULARY = 11


class Squared(nn.Module):
    """Wraps layers and returns the mean square of their result."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).float().square().mean()
        return loss


class Head(nn.Module):
    """Takes the first element of a result that is a tuple (recurrent layers)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.body(x)[0]
        return first


def mlp() -> nn.Module:
    return Squared(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))


def conv_net() -> nn.Module:
    return Squared(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.2),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.SiLU(inplace=True),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def channels_last() -> nn.Module:
    net = conv_net()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def gpt() -> GPT:
    """Return a decoder with dropout, learned positions and tied embeddings."""
    shape = GPTConfig(
        vocab_size=VOCABULARY,
        seq_length=TOKENS,
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        hidden_dropout=0.2,
    )
    return GPT(shape)


class Statistical(nn.Module):
    """Running statistics, dropout, a number, and a tensor that outlives the iteration."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        self.kept = hidden.detach().mean()
        out: Tensor = self.last(hidden) * self.scale
        return out.square().mean()


class LSTMCells(nn.Module):
    """Steps over time in Python and writes into slices of one result."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], WIDTH)
        result = torch.empty_like(x)
        for index in range(x.shape[1]):
            hidden, cell = self.cell(x[:, index], (hidden, cell))
            result[:, index] = hidden
        return result.square().mean()


class UnusedParameter(nn.Module):
    """One parameter gets no gradient, one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)
        self.used = nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.used(self.norm(self.frozen(x)).relu()).square().mean()
        return loss


class Rotary(nn.Module):
    """Complex numbers between real parameters; conjugates; an FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.angle = nn.Parameter(torch.linspace(0, 1, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (-1, 2)))
        turned = pairs * torch.polar(torch.ones_like(self.angle), self.angle)
        spectrum = torch.fft.fft(turned.conj())
        loss: Tensor = (spectrum * turned).real.square().mean() + turned.imag.mean()
        return loss


class OddShapes(nn.Module):
    """Parameters with no dimension, with no element, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t())
        self.sliced = nn.Parameter(torch.randn(5, 9)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([self.empty, x]) @ self.transposed @ self.sliced
        nothing = self.empty.sum() + (x[:0] @ self.transposed).sum()
        return (hidden.tanh() * self.scale).square().mean() + nothing


class Shared(nn.Module):
    """One layer runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.norm(self.layer(x)).tanh()
        loss: Tensor = x.square().mean()
        return loss


class _Clamp(torch.autograd.Function):
    """Clamps forward, lets the gradient pass backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.where(x.abs() > ctx.bound, 0.5, 1.0), None


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        clamped: Tensor = _Clamp.apply(self.layer(x), 0.5)  # type: ignore[no-untyped-call]
        return clamped.square().mean()


def parametrized() -> nn.Module:
    return Squared(
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )


class MovingAverage(nn.Module):
    """Buffers of many dtypes that are updated in place; an activation that is kept."""

    average: Tensor
    num_calls: Tensor
    histogram: Tensor
    flags: Tensor
    history: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("history", torch.zeros(3, WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("histogram", torch.zeros(WIDTH, dtype=torch.int64))
        self.register_buffer("flags", torch.ones(WIDTH, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) - self.average
        self.average.lerp_(hidden.detach().mean(dim=0), 0.1)
        self.num_calls += 1
        self.histogram.scatter_add_(0, x.argmax(dim=1), torch.ones_like(x[:, 0], dtype=torch.int64))
        self.flags.logical_xor_(x[0] > 0)
        self.kept = hidden.detach()
        self.history[:, 0] += self.kept[0, :3]
        self.history.t()[1::2].lerp_(self.kept[:3].t()[1::2], 0.5)
        loss: Tensor = (hidden * self.flags).square().mean() / self.num_calls.sqrt()
        return loss


class InPlace(nn.Module):
    """In-place operations on views, on slices and on inputs' copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden[:, :3].mul_(2.0)
        hidden.view(-1, 2, WIDTH // 2)[:, 1] += 1.0
        hidden = hidden.clone().t_().unsqueeze_(0).squeeze_(0).t()
        hidden[hidden > 1.0] = 0.25
        hidden.diagonal().fill_(0.25)
        hidden.as_strided((2, 2), (1, WIDTH), 2).add_(0.125)
        left, right = self.second(hidden).chunk(2, dim=1)
        loss: Tensor = left.contiguous().add_(right.exp()).square().mean()
        return loss


class GradientPenalty(nn.Module):
    """A gradient inside the loss: double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.layers(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty: Tensor = score.square().mean() + (slope.square().sum(dim=1) - 1).square().mean()
        return penalty


class Keywords(nn.Module):
    """Nested batches, keyword arguments, plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, batch: dict[str, Any], *, scales: list[Tensor], power: int = 1, mode: str = "sum"
    ) -> Tensor:
        x = batch["x"] * batch["nested"]["mask"]
        total = self.layer(x) * scales[0].unsqueeze(1) + scales[1]
        loss: Tensor = total.pow(power).mean() if mode == "mean" else total.pow(power).sum() / 10
        return loss


@dataclass
class ModelOutput:
    """Looks like the output of a Hugging Face model."""

    loss: Tensor
    logits: Tensor


class WithOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> ModelOutput:
        logits = self.layer(x)
        return ModelOutput(logits.logsumexp(dim=1).mean(), logits)
