"""Gradients are computed where they are kept, with the bits that the copies would have had."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import graphfsdp
from graphfsdp.errors import CaptureError
from graphfsdp.optim import FusedAdam
from unseen import Unseen

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# A multiple of 64 numbers of 4 bytes: every gradient begins where kernels need no other code.
WIDTH = 64
NUM_CALLS = 10


class Net(nn.Module):
    """Linear layers, a norm whose gradients no ``out=`` takes, and a weight that is used twice."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.norm(F.gelu(self.first(x)))), x)


def double(grad: Tensor) -> Tensor:
    return grad.mul_(2)


def changed_in_place(model: Net) -> None:
    model.first.weight.register_hook(double)


def looked_at(model: Net) -> None:
    model.first.weight.register_post_accumulate_grad_hook(lambda param: None)


def kept(model: Net) -> None:
    def keep(grad: Tensor) -> None:
        model.kept = grad

    model.first.weight.register_hook(keep)


def nothing(model: Net) -> None: ...


def own_iteration(models: Any, optimizers: Any, x: Tensor) -> Tensor:
    loss: Tensor = models(x)
    loss.backward()
    optimizers.step()
    optimizers.zero_grad()
    return loss


# Options of capture; what is done to the model; then of the six gradients how many are copied by
# themselves, and whether some are copied together at the end.
CASES: dict[str, tuple[dict[str, Any], Callable[[Net], None], int, int]] = {
    "plain": ({}, nothing, 0, 1),
    "clipped": ({"max_grad_norm": 0.1}, nothing, 0, 1),
    "two microbatches, of which the second adds": ({"microbatches": 2}, nothing, 2, 0),
    "a hook changes a gradient in place": ({}, changed_in_place, 0, 1),
    "a hook keeps a gradient": ({}, kept, 1, 1),
    "a hook may look at gradients early": ({}, looked_at, 2, 0),
    "an iteration of the user's own": ({"iteration": own_iteration}, nothing, 2, 0),
}


def train(scope: str, model: nn.Module, **options: Any) -> Any:
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    step = graphfsdp.capture(model, optimizer, scope=scope, **options)
    generator = torch.Generator().manual_seed(1)
    losses = [
        step(torch.randn(8, WIDTH, generator=generator).to(CUDA)).item() for _ in range(NUM_CALLS)
    ]
    return step, losses, [param.detach().clone() for param in model.parameters()]


def gradient_copies(step: Any) -> tuple[int, int]:
    """Count copies of one tensor, and copies of several at once."""
    counts = step.report().program.op_counts()
    return counts.get("aten.copy_.default", 0), counts.get("aten._foreach_copy_.default", 0)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_land_where_they_are_kept(case: str, tied: bool) -> None:
    options, prepare, *copies = CASES[case]

    def model() -> Net:
        torch.manual_seed(0)
        made = Net(tied=tied).to(CUDA)
        prepare(made)
        return made

    step, losses, params = train("full_iteration", model(), **options)
    _, expected, wanted = train("none", model(), **options)
    assert losses == expected
    assert all(map(torch.equal, params, wanted))
    assert [*gradient_copies(step)] == copies
    step.close()


class Products(torch.autograd.Function):
    """The sum of two products; which gradient is whose is for somebody else to say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, w: Tensor, crosses: Unseen) -> Tensor:
        ctx.save_for_backward(x)
        ctx.crosses = crosses
        return x @ v + x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grads = x.t() @ grad, x.t() @ (2 * grad)
        return (None, *(reversed(grads) if next(ctx.crosses) else grads), None)


class Crossing(nn.Module):
    """Two tensors, or two gradients, take each other's way, of which no operator tells.

    From the fourth call on, or in each second one from then on.
    """

    def __init__(self, *, forward: bool = False, backward: bool = False, alternates: bool = False):
        super().__init__()
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        before = (False, False, False)
        self.in_forward = Unseen(*before, forward)
        self.in_backward = Unseen(*before, *(backward, not alternates and backward) * NUM_CALLS)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.sin(), x.cos()
        if next(self.in_forward):
            first, second = second, first
        y: Tensor = Products.apply(first.exp() - second.neg(), self.v, self.w, self.in_backward)  # type: ignore[no-untyped-call]
        return y.square().mean()


def crossing(**where: bool) -> Crossing:
    torch.manual_seed(0)
    return Crossing(**where).to(CUDA)


def test_gradients_that_take_another_way_each_time_are_refused() -> None:
    with pytest.raises(CaptureError, match="another way with a gradient than its last warm-up"):
        train("full_iteration", crossing(backward=True, alternates=True))


# What has changed is warmed up once more; what a capture can do with its copies is captured.
@pytest.mark.parametrize(("where", "copies"), [("forward", (2, 0)), ("backward", (0, 0))])
def test_what_takes_another_way_from_now_on_is_captured(
    where: str, copies: tuple[int, int]
) -> None:
    step, losses, params = train("full_iteration", crossing(**{where: True}))
    _, expected, wanted = train("none", crossing(**{where: True}))
    assert losses == expected
    assert all(map(torch.equal, params, wanted))
    assert gradient_copies(step) == copies
    step.close()
