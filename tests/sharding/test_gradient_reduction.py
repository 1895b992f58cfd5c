"""How gradients are summed: in any order, on two axes, per token; padding; hooks on the sums."""

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
    STRATEGIES,
    Net,
    assert_equal_tensors,
    assert_trains_as_whole,
    batches,
    buffers,
    full_gradients,
    full_parameters,
    make_net,
    my_part,
    num_steps_of,
    on_meta,
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
    for reduction in ("mean", "sum") if both else ("mean",):
        model: Any = Sometimes().double()
        model.load_state_dict(start)
        model = shard(model, strategy, outer_strategy=outer, gradient_reduction=reduction)
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
    model: Any = make_net("optim_grads_params", outer_strategy="no_shard")
    first, second = batches(2)
    model.set_requires_all_reduce(False)
    model(*my_part(first)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.abandon_iteration()
    model.set_requires_all_reduce(True)
    model(*my_part(second)).backward()
    other = make_net("optim_grads_params", outer_strategy="no_shard")
    other(*my_part(second)).backward()
    assert_equal_tensors(full_gradients(model), full_gradients(other))


def hooked_net(strategy: str | None, *, meta: bool = False, **options: Any) -> nn.Module:
    """What its hooks do to a gradient is no sum over ranks, and differs in each element."""
    model = make_net(None if meta else strategy, dtype=torch.float64, **options)
    if meta:
        assert strategy is not None
        state = model.state_dict()
        model = shard(on_meta(lambda: Net().double()), strategy)
        model.to_empty(device=rank_device())
        model.load_state_dict(state)

    def halve(param: Any) -> None:
        param.grad.mul_(0.5)

    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: torch.tanh(grad * 30))
            param.register_post_accumulate_grad_hook(halve)
    return model


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        *(("ranks2", strategy, {}) for strategy in STRATEGIES),
        ("ranks2", "optim_grads_params", {"overlap": False}),
        *(("ranks2", strategy, {"meta": True}) for strategy in ("no_shard", "optim_grads_params")),
        ("ranks4", "optim_grads_params", {"outer_strategy": "no_shard"}),
        ("ranks4", "optim_grads_params", {"outer_strategy": "optim"}),
    ],
)
@on_ranks()
def test_hooks_see_what_all_ranks_have_reduced(strategy: str, options: dict[str, Any]) -> None:
    """As in one process, where each microbatch is reduced over all ranks, or there is but one."""
    num_steps = num_steps_of(strategy, "optim_grads_params")
    rows = slice(dist.get_rank(), None, dist.get_world_size())  # of each microbatch as many
    data = [[part[rows].to(rank_device()) for part in batch] for batch in batches(num_steps)]
    for microbatches in (1, 3):
        got = replayed_as_eager(
            partial(hooked_net, strategy, **options),
            num_steps=num_steps,
            data=data,
            microbatches=microbatches,
        )
        if microbatches == 1 or (
            strategy.startswith("optim_grads") and "outer_strategy" not in options
        ):
            assert_trains_as_whole(got, whole=hooked_net(None), microbatches=microbatches)


def stepping_in_backward(model: Any, optimizers: Any, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_optimizers_that_step_in_backward_are_captured(strategy: str) -> None:
    runs = []
    for scope in ("none", "full_iteration"):
        model = make_net(strategy)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in params}

        def step(param: Any, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            param.grad = None

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        options: Any = {"iteration": stepping_in_backward, "scope": scope}
        with graphfsdp.capture(model, [*optimizers.values()], **options) as captured:
            num_steps = num_steps_of(strategy, "optim_grads_params")
            losses = [captured(*my_part(batch)) for batch in batches(num_steps)]
            if scope != "none":
                assert captured.report().num_captures == 1
        assert losses[-1] != losses[0]
        runs.append([*losses, *full_parameters(model).values()])
    assert_equal_tensors(*runs)
