"""How gradients are summed: in any order, on two axes, per token, by layers themselves."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from counting_net import mean_square
from graphfsdp.base.collectives import all_reduce_
from graphfsdp.optim import FusedAdam
from helpers import set_lr
from ranks import RankPool, on_ranks, rank_device, world_group
from sharding_helpers import (
    MAX_NORM,
    STRATEGIES,
    Net,
    adam,
    assert_equal_tensors,
    batches,
    buffers,
    hybrid_mesh,
    hybrid_net,
    learning_rate,
    my_part,
    replayed_as_eager,
    shard,
    train,
)

NUM_STEPS = 14
NUM_SEQUENCES = 8


class TokenModel(nn.Module):
    """A language model whose loss is a sum over the tokens that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 10)
        self.head = nn.Linear(10, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens))))
        return hidden


def token_batches(device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, 11, (NUM_SEQUENCES, 5), generator=generator)
        targets = torch.randint(0, 11, (NUM_SEQUENCES, 5), generator=generator)
        # Ever more masked towards the end, so that ranks hold very different numbers of tokens.
        rows = torch.arange(NUM_SEQUENCES)[:, None] / NUM_SEQUENCES
        mask = (torch.rand(NUM_SEQUENCES, 5, generator=generator) > 0.9 * rows).float()
        found.append((tokens.to(device), targets.to(device), mask.to(device)))
    return found


def summed_loss(model: nn.Module, tokens: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (losses * mask.flatten()).sum()


def per_token_on_one(model: nn.Module, *batch: Tensor) -> Tensor:
    return summed_loss(model, *batch) / batch[2].sum()


def per_token_on_all(model: nn.Module, *batch: Tensor) -> Tensor:
    num_tokens = batch[2].sum()
    all_reduce_(num_tokens, world_group(), reduction="sum")
    return summed_loss(model, *batch) / num_tokens


def summing(strategy: str) -> nn.Module:
    torch.manual_seed(0)
    model = TokenModel().to(rank_device())
    graphfsdp.fully_shard(model.inner, strategy=strategy, gradient_reduction="sum")
    return graphfsdp.fully_shard(model, strategy=strategy, gradient_reduction="sum")


def both_per_token(strategy: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    data = [*map(my_part, token_batches(rank_device()))]
    replayed = replayed_as_eager(lambda: summing(strategy), data=data, loss_fn=per_token_on_all)
    for loss in replayed.losses:
        dist.all_reduce(loss)
    whole = {name: param.cpu() for name, param in replayed.params.items()}
    return [loss.cpu() for loss in replayed.losses], whole


def test_a_per_token_loss_weighs_every_token_of_all_ranks_alike(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    model = TokenModel()
    optimizer = adam(model)
    step = graphfsdp.capture(
        model, optimizer, loss_fn=per_token_on_one, scope="none", max_grad_norm=MAX_NORM
    )
    losses = []
    for index, batch in enumerate(token_batches(torch.device("cpu"))):
        set_lr(optimizer, learning_rate(index))
        losses.append(step(*batch))
    for strategy in ("no_shard", "optim_grads_params"):
        for rank_losses, whole in ranks2.run(both_per_token, strategy):
            # About 100 summands of order 1 in another order, and Adam's quotient of them.
            torch.testing.assert_close(rank_losses, losses, rtol=1e-5, atol=1e-5)
            for name, param in model.named_parameters():
                torch.testing.assert_close(whole[name], param.detach(), rtol=1e-4, atol=1e-5)


class _OwnWeightGradient(torch.autograd.Function):
    """A linear map whose backward adds to the weight's gradient buffer by itself."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.get_main_grad = weight.get_main_grad  # type: ignore[attr-defined]
        assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        ctx.get_main_grad().addmm_(grads[0].t(), inputs)
        # A dummy, as fused layers return one for autograd's sake.
        return grads[0] @ weight, torch.full_like(weight, float("nan"))


class OwnLinear(nn.Linear):
    """A linear layer in the manner of a fused weight-gradient GEMM."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result: Tensor = _OwnWeightGradient.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return result


def train_linear(kind: type[nn.Linear], strategy: str, scope: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers = [kind(6, 10, bias=False), kind(10, 6, bias=False)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1]).to(rank_device())
    for layer in layers:
        graphfsdp.fully_shard(layer, strategy=strategy)
    graphfsdp.fully_shard(model, strategy=strategy)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = [(torch.randn(4, 6, generator=generator).to(rank_device()),) for _ in range(NUM_STEPS)]
    options: dict[str, Any] = {"loss_fn": mean_square, "max_grad_norm": None, "microbatches": 2}
    return train(model, optimizer, data=data, scope=scope, **options).tensors()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_a_layer_may_add_to_the_gradient_buffer_by_itself(strategy: str) -> None:
    eager = train_linear(OwnLinear, strategy, "none")
    assert_equal_tensors(eager, train_linear(OwnLinear, strategy, "full_iteration"))
    plain = train_linear(nn.Linear, strategy, "none")
    # The same products, added in another order: a handful of roundings.
    torch.testing.assert_close(eager, plain, rtol=1e-4, atol=1e-6)


class Poison(TorchDispatchMode):
    """Fills new memory with NaN, and keeps what is to be reduced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reduced: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).startswith("graphfsdp.reduce_scatter_"):
            self.reduced.append(args[1].clone())
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
            result.fill_(float("nan"))
        return result


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@on_ranks("ranks2")
def test_padding_is_reduced_as_zeros(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(rank_device())
    graphfsdp.fully_shard(model, strategy=strategy)
    assert sum(buffer.layout.num_padding for buffer in buffers(model)) > 0
    x = torch.ones(2, 7, device=rank_device())
    for _ in range(2):
        with Poison() as poison:
            model(x).sum().backward()
        assert poison.reduced
        assert all(bool(each.isfinite().all()) for each in poison.reduced)


class Sometimes(Net):
    """Leaves a block out where it is told to."""

    leaves_out = False

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks[1](self.embedding(tokens))
        if not self.leaves_out:
            hidden = self.blocks[0](hidden)
        out: Tensor = self.head(hidden) * self.scale + self.empty.sum()
        return out


# Per backward pass: is it the last microbatch? "local": it runs under no_sync; "partly": it is
# the last one, and a unit is left out of it, which has been reduced, or has not.
PASSES = (
    *((True, True), (False, True), (True, False, True), ("local", True), ("local", False, True)),
    *((False, "partly"), ("local", "partly")),
)


# On one axis, and on two.
SUMMED = [
    *(("no_shard", None), ("optim", None), ("optim_grads_params", None)),
    *(("no_shard", "no_shard"), ("optim_grads", "no_shard")),
    *(("optim", "optim"), ("optim_grads_params", "optim")),
]


@pytest.mark.parametrize(("strategy", "outer"), SUMMED)
@on_ranks("ranks4")
def test_gradients_accumulate_in_any_order_of_reductions(strategy: str, outer: str | None) -> None:
    """Backward passes in a row give the sum of their gradients, however they are reduced."""
    plain: Any = Sometimes().double()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    # What each rank adds up is the same; the factor of the last reduction is by kind of reduction.
    both = (strategy, outer) in (SUMMED[0], SUMMED[1], SUMMED[-1])
    axes: dict[str, Any] = {}
    if outer is not None:
        axes = {"mesh": hybrid_mesh(), "outer_strategy": outer}
    for reduction in ("mean", "sum") if both else ("mean",):
        model: Any = Sometimes().double()
        model.load_state_dict(start)
        model = shard(model, strategy, gradient_reduction=reduction, **axes)
        for passes in PASSES:
            model.zero_grad()
            plain.zero_grad()
            for batch, last in zip(batches(len(passes)), passes, strict=True):
                plain.leaves_out = model.leaves_out = last == "partly"
                plain(*batch).backward()
                model.set_is_last_microbatch(bool(last) or last == "local")
                with model.no_sync() if last == "local" else contextlib.nullcontext():
                    model(*my_part(batch)).backward()
                assert last != "local" or all(param.grad is None for param in model.parameters())
            scale = dist.get_world_size() if reduction == "sum" else 1
            for (name, got), whole in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                assert (got.grad is None) == (whole.grad is None), name
                if whole.grad is not None:
                    # float64: what is not a rounding is a mistake.
                    torch.testing.assert_close(
                        got.grad.full_tensor().cpu(), whole.grad * scale, rtol=1e-10, atol=1e-12
                    )


@on_ranks("ranks4")
def test_an_iteration_that_is_given_up_leaves_no_gradient() -> None:
    """set_requires_all_reduce, and an iteration that is given up between two microbatches."""
    model = hybrid_net("optim_grads_params", "no_shard")
    first, second = batches(2)
    model.set_requires_all_reduce(False)
    model(*my_part(first)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.abandon_iteration()
    model.set_requires_all_reduce(True)
    model(*my_part(second)).backward()
    other = hybrid_net("optim_grads_params", "no_shard")
    other(*my_part(second)).backward()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            assert torch.equal(left.grad.to_local(), right.grad.to_local())
