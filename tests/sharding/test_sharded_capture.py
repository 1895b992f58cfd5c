"""Captured training of sharded models: against eager, an unsharded run, and DDP."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphfsdp
from helpers import NUM_STEPS, set_lr
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Block,
    adam,
    assert_equal_tensors,
    assert_replayed,
    assert_trains_as_whole,
    batches,
    full_parameters,
    learning_rate,
    make_net,
    my_part,
    num_steps_of,
    replayed_as_eager,
    shard,
    train,
)


def both_scopes(strategy: str, microbatches: int, num_steps: int, optimizer: str) -> None:
    make = functools.partial(make_net, strategy, dtype=torch.float64)
    got = replayed_as_eager(make, optimizer, num_steps, microbatches=microbatches)
    assert_trains_as_whole(got, optimizer)


@pytest.mark.parametrize(
    ("ranks", "strategy", "microbatches", "optimizer"),
    [
        ("ranks1", "optim_grads_params", 3, "fused_adam"),
        ("ranks2", "no_shard", 3, "fused_adam"),
        ("ranks2", "optim", 1, "adamw"),
        ("ranks2", "optim_grads", 3, "fused_adam"),
        ("ranks2", "optim_grads_params", 3, "fused_adam"),
        ("ranks2", "optim_grads_params", 1, "adamw"),
        ("ranks4", "optim", 3, "fused_adam"),
        ("ranks4", "optim_grads_params", 1, "fused_adam"),
        *(
            pytest.param("gpu_ranks", strategy, number, "fused_adam", marks=pytest.mark.gpu)
            for strategy in STRATEGIES
            for number in (1, 3)
        ),
    ],
)
def test_ranks_train_as_one_and_replay_as_eager(
    request: pytest.FixtureRequest, ranks: str, strategy: str, microbatches: int, optimizer: str
) -> None:
    num_steps = num_steps_of(ranks, "ranks2", "gpu_ranks")
    pool = request.getfixturevalue(ranks)
    pool.run(both_scopes, strategy, microbatches, num_steps, optimizer)


def ddp_steps(num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = make_net(None)
    optim = adam(model, "adamw")
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    losses = []
    for index, batch in enumerate(batches(num_steps)):
        set_lr(optim, learning_rate(index))
        optim.zero_grad()
        loss = wrapped(*my_part(batch))
        loss.backward()
        optim.step()
        losses.append(loss.detach())
    return losses, full_parameters(model)


@on_ranks("ranks2")
def test_no_shard_equals_ddp_bit_for_bit() -> None:
    """Two ranks: a + b is b + a, and halving is exact, so the order of additions is no matter."""
    model = make_net("no_shard")
    got = train(model, adam(model, "adamw"), max_grad_norm=None)
    assert_replayed(got)
    losses, params = ddp_steps(NUM_STEPS)
    assert_equal_tensors(losses, got.losses)
    # DDP gives an unused parameter a zero gradient, so its weight decays; ours has none.
    params["unused"] = got.params["unused"]
    assert_equal_tensors(params, got.params)


class Twice(nn.Module):
    """One unit that runs twice in a forward pass, and another that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(8), nn.BatchNorm1d(8)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](self.inp(x))
        hidden = self.blocks[0](torch.relu(self.blocks[1](hidden)))
        out: Tensor = hidden.square().mean()
        return out


def inputs(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    return [torch.randn(6, 4, generator=generator).to(rank_device()) for _ in range(num)]


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_unit_that_runs_twice_and_batch_norm(strategy: str) -> None:
    num_steps = num_steps_of(strategy, "optim_grads_params")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return shard(Twice().to(rank_device()), strategy)

    data = [(x,) for x in inputs(num_steps)]
    got = replayed_as_eager(make, num_steps=num_steps, data=data, max_grad_norm=1.0)
    assert int(got.buffers["blocks.1.num_batches_tracked"]) == num_steps
    # Against DDP's arithmetic by hand: the mean of the ranks' gradients of a plain model.
    torch.manual_seed(0)
    model = Twice().to(rank_device())
    optim = adam(model)
    for index, x in enumerate(inputs(num_steps)):
        set_lr(optim, learning_rate(index))
        optim.zero_grad()
        model(x).backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(got.params[name], param.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks("ranks2")
def test_evaluation_between_captured_steps(strategy: str) -> None:
    """Evaluation passes between training steps see the newest weights and disturb nothing."""
    num_steps = num_steps_of(strategy, "optim_grads_params")
    runs = []
    for evaluates in (False, True):
        model = make_net(strategy)
        optim = adam(model)
        losses = []
        with graphfsdp.capture(model, optim, max_grad_norm=1.0) as step:
            for index, batch in enumerate(batches(num_steps)):
                if evaluates:
                    with_grad = index % 2 == 1  # and nobody calls backward
                    plain = make_net(None)
                    plain.load_state_dict(full_parameters(model), strict=False)  # head is tied
                    with torch.set_grad_enabled(with_grad):
                        got, expected = model(*my_part(batch)), plain(*my_part(batch))
                    assert torch.equal(got, expected), f"before call {index}"
                    assert got.requires_grad == with_grad
                    del got, expected
                losses.append(step(*my_part(batch)))
        runs.append((losses, full_parameters(model)))
    for before, after in zip(*runs, strict=True):
        assert_equal_tensors(before, after)
