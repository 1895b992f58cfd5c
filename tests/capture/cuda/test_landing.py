"""Gradients are computed where they are kept, with the bits that the copies would have had."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import assert_any_order
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.errors import CaptureError
from graphfsdp.optim import FusedAdam
from hidden_count import Unseen
from ranks import RankPool, rank_device
from sharding_helpers import assert_equal_tensors, shard

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


def nothing(model: nn.Module) -> None: ...


def own_iteration(models: Any, optimizers: Any, x: Tensor) -> Tensor:
    loss: Tensor = models(x)
    loss.backward()
    optimizers.step()
    optimizers.zero_grad()
    return loss


# Options of capture; what is done to the model; then of the six gradients how many are copied by
# themselves, and how often some are copied together.
CASES: dict[str, tuple[dict[str, Any], Callable[[Net], object], int, int]] = {
    "plain": ({}, nothing, 0, 1),
    "clipped": ({"max_grad_norm": 0.1}, nothing, 0, 1),
    "two microbatches, of which the second adds": ({"microbatches": 2}, nothing, 0, 1),
    "a hook changes a gradient in place": (
        {},
        lambda model: model.first.weight.register_hook(lambda grad: grad.mul_(2)),
        *(0, 1),
    ),
    "a hook keeps a gradient": (
        {},
        lambda model: model.first.weight.register_hook(lambda grad: setattr(model, "kept", grad)),
        *(1, 1),
    ),
    "a hook may look at a gradient early": (
        {},
        lambda model: model.first.weight.register_post_accumulate_grad_hook(lambda param: None),
        *(0, 1),
    ),
    "an iteration of the user's own": ({"iteration": own_iteration}, nothing, 2, 0),
}


def train(scope: str, model: nn.Module, **options: Any) -> Any:
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    step = graphfsdp.capture(model, optimizer, scope=scope, **options)
    generator, device = torch.Generator().manual_seed(1), next(model.parameters()).device
    losses = [
        step(torch.randn(8, WIDTH, generator=generator).to(device)).item() for _ in range(NUM_CALLS)
    ]
    return step, losses, [param.detach().clone() for param in model.parameters()]


def trained_as_eager(make: Callable[[], nn.Module], **options: Any) -> tuple[int, int]:
    """Compare a captured training with an eager one; return what is copied of gradients."""
    step, losses, params = train("full_iteration", make(), **options)
    _, expected, wanted = train("none", make(), **options)
    assert losses == expected
    assert all(map(torch.equal, params, wanted))
    copies = gradient_copies(step)
    step.close()
    return copies


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

    assert [*trained_as_eager(model, **options)] == copies


class Again(nn.Module):
    """Gets three gradients for each parameter in one backward pass, of which none may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True, preserve_rng_state=False)
        return x.square().mean()


@pytest.mark.parametrize("wide", [False, True])
def test_several_gradients_in_one_backward_pass_are_added(wide: bool) -> None:
    torch.manual_seed(0)
    model = Again().to(CUDA, torch.bfloat16)
    x = torch.randn(8, WIDTH, device=CUDA, dtype=torch.bfloat16)
    model(x).backward()
    expected = [param.grad.float() for param in model.parameters() if param.grad is not None]
    dtype = torch.float32 if wide else torch.bfloat16
    policy = MixedPrecisionPolicy(main_grads_dtype=dtype, use_decoupled_grad=wide)
    optimizer = FusedAdam(model.parameters(), lr=0.0, use_decoupled_grad=wide)
    with graphfsdp.capture(model, optimizer, scope="none", mp_policy=policy) as step:
        step(x)
        name = "decoupled_grad" if wide else "grad"
        got = [getattr(param, name) for param in model.parameters()]
    assert [each.dtype for each in got] == [dtype] * 2
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.02, atol=1e-5)


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
@pytest.mark.parametrize(("where", "copies"), [("forward", (0, 1)), ("backward", (0, 0))])
def test_what_takes_another_way_from_now_on_is_captured(
    where: str, copies: tuple[int, int]
) -> None:
    assert trained_as_eager(lambda: crossing(**{where: True})) == copies


class Blocks(nn.Module):
    """Two units and what is left, in which a weight is used twice."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Net(), Net()])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        y, loss = self.first(x), x.new_zeros(())
        for block in self.blocks:
            loss = loss + (graphfsdp.recompute(block, y) if self.recomputes else block(y))
        return loss + F.mse_loss(self.last(y), x)


FULL, HALF = "optim_grads_params", MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# The strategy; options of fully_shard, of the model and of capture; then, as above, copies of
# single gradients and of several, of 13: 2 times 6 in units, and the tied one.
SHARDED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int, int]] = {
    "ZeRO-3": (FULL, {}, {}, {"max_grad_norm": 0.1}, 0, 2),
    "ZeRO-3, in turn": (FULL, {"overlap": False}, {}, {}, 0, 2),
    "ZeRO-3, recomputed": (FULL, {}, {"recomputes": True}, {}, 0, 2),
    "ZeRO-2, two microbatches": ("optim_grads", {}, {}, {"microbatches": 2}, 0, 4),
    "ZeRO-1, two microbatches": ("optim", {}, {}, {"microbatches": 2}, 0, 2),
    "not sharded": ("no_shard", {}, {}, {}, 0, 2),
    # Five are the casts of weights, into the memory of their gathers: the root has one.
    "cast": (FULL, {"mp_policy": HALF}, {}, {}, 1 + 5, 2),
}


def train_shards(case: str, scope: str) -> tuple[list[Tensor], tuple[int, int], str]:
    strategy, options, of_model, of_capture, *_ = SHARDED[case]
    torch.manual_seed(0)
    model = shard(Blocks(**of_model).to(rank_device()), strategy, **options)
    library.take_races()
    step, losses, params = train(scope, model, **of_capture)
    found = [torch.tensor(losses), *(param.to_local() for param in params)]
    copies = (0, 0)
    if scope != "none":
        copies = gradient_copies(step)
        assert_any_order(step, num_orders=20)
    step.close()
    return found, copies, library.take_races()


def land_shards(case: str) -> tuple[int, int]:
    got, copies, races = train_shards(case, "full_iteration")
    expected, *_ = train_shards(case, "none")
    assert not races
    assert_equal_tensors(got, expected)
    return copies


@pytest.mark.skipif(not library.is_below(), reason="its orders need the stand-in: make cuda-test")
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("case", SHARDED)
def test_gradients_of_shards_land_in_what_is_reduced(case: str, gpu_ranks: RankPool) -> None:
    assert gpu_ranks.run(land_shards, case) == [tuple(SHARDED[case][-2:])] * 2
