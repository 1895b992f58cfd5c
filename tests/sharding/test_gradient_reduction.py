"""How gradients are summed: in any order, on two axes, per token; padding."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.base.collectives import all_reduce_
from helpers import NUM_STEPS
from overlap_helpers import Watch
from ranks import on_ranks, rank_device, world_group
from sharding_helpers import (
    Net,
    assert_trains_as_whole,
    batches,
    buffers,
    hybrid_mesh,
    hybrid_net,
    make_net,
    my_part,
    replayed_as_eager,
    shard,
)


def per_token(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Give this rank's part of the mean loss over the tokens of all ranks."""
    num_tokens = torch.full((), tokens.numel(), dtype=torch.float64, device=tokens.device)
    of_all = num_tokens.clone()
    all_reduce_(of_all, world_group(), reduction="sum")
    loss: Tensor = model(tokens, targets) * num_tokens / of_all
    return loss


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_per_token_loss_weighs_every_token_of_all_ranks_alike(strategy: str) -> None:
    """Ranks have sequences in very different numbers."""
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, None)
    data = [[part[mine].to(rank_device()) for part in batch] for batch in batches(NUM_STEPS)]
    got = replayed_as_eager(
        partial(make_net, strategy, dtype=torch.float64, gradient_reduction="sum"),
        data=data,
        loss_fn=per_token,
    )
    got.losses = [loss * dist.get_world_size() for loss in got.losses]  # whose mean is compared
    assert_trains_as_whole(got)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@on_ranks("ranks2")
def test_padding_is_reduced_as_zeros(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(rank_device())
    graphfsdp.fully_shard(model, strategy=strategy)
    assert sum(buffer.layout.num_padding for buffer in buffers(model)) > 0
    reduced: list[Tensor] = []
    x = torch.ones(2, 7, device=rank_device())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # on a CPU new memory holds NaN then
    try:
        with Watch("reduce_scatter", lambda rows, whole: reduced.append(whole.clone())):
            for _ in range(2):
                model(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert reduced
    assert all(bool(each.isfinite().all()) for each in reduced)


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
