"""Experts on several ranks, beside one process that has them all, and beside ``fully_shard``."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp import ConfigError
from graphfsdp.moe import MoE, overflowed_tokens
from moe_models import MixedModel, assert_same_sums, dropless, experts_on_ranks, tokens_of
from ranks import on_ranks, rank_device
from sharding_helpers import (
    Training,
    adam,
    assert_replayed,
    assert_same_training,
    learning_rate,
    my_part,
    train,
)

NUM_CALLS = 14  # 4 that are not replays
# Adam's moments are float32: a rounding more or less is 2**-24 of an update, of about the rate.
TOLERANCE = NUM_CALLS * learning_rate(0) * 2**-24


def plain(**options: Any) -> Any:
    torch.manual_seed(0)
    return MixedModel(**options).double().to(rank_device())


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tokens_of(12, generator) for _ in range(count)]


def trained(model: Any, *, whole: bool = False, **options: Any) -> Training:
    data = batches(NUM_CALLS)
    parts = [
        [part.to(rank_device()) for part in batch] if whole else my_part(batch) for batch in data
    ]
    return train(model, adam(model), data=parts, max_grad_norm=float("inf"), **options)


BALANCED = {"aux_loss_coeff": 0.1, "bias_update_rate": 0.01}


@pytest.mark.parametrize(
    ("ranks", "num_expert_ranks", "strategy", "microbatches", "options"),
    [
        ("ranks1", 1, "optim_grads_params", 1, {"bias_update_rate": 0.01}),  # all experts
        ("ranks2", 2, "optim", 2, {**BALANCED, "recomputes": True, "score_function": "sigmoid"}),
        ("ranks2", 2, "optim_grads_params", 1, {"capacity_factor": 1.0}),
        ("ranks4", 2, "optim_grads_params", 3, BALANCED),
        ("ranks4", 2, "no_shard", 1, BALANCED),
    ],
    ids=str,
)
@on_ranks()
def test_experts_on_ranks_train_as_in_one_process(
    num_expert_ranks: int, strategy: str, microbatches: int, options: dict[str, Any]
) -> None:
    """Captured equals eager bit for bit, and one process up to rounding."""
    runs = [
        trained(
            experts_on_ranks(num_expert_ranks, strategy, **options),
            scope=scope,
            microbatches=microbatches,
        )
        for scope in ("none", "full_iteration")
    ]
    assert_same_training(*runs)
    assert_replayed(runs[1])
    overflow = sum(int(b.sum()) for name, b in runs[1].buffers.items() if "overflow" in name)
    if options.get("capacity_factor") is not None:  # other ranks leave out other tokens
        assert overflow > 0
        return
    assert overflow == 0
    alone = trained(plain(**options), whole=True, scope="none", microbatches=microbatches)
    for mine, expected in zip(runs[1].losses, alone.losses, strict=True):
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE)
    for name, expected in alone.params.items():
        torch.testing.assert_close(runs[1].params[name], expected, rtol=0, atol=TOLERANCE)
    for name, expected in alone.buffers.items():
        counts = runs[1].buffers[name]
        if "bias" not in name:
            dist.all_reduce(counts)
        assert torch.equal(counts, expected), name


@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"])
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {"capacity_factor": 2.6}), (torch.bfloat16, {})], ids=str
)
@on_ranks()
def test_experts_of_other_ranks_have_the_bits_of_dropless_ones(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Each expert has the same rows in the same order, so that its bits are the same too."""
    torch.manual_seed(0)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    alone = MoE(24, 64, 8, topk=3).to(rank_device(), dtype)
    torch.manual_seed(0)
    layer = MoE(24, 64, 8, topk=3, expert_group=dist.group.WORLD, **options)
    layer = layer.to(rank_device(), dtype)
    for _ in range(3):
        x = torch.randn(num_ranks, 21, 24).to(rank_device(), dtype)
        grad = torch.randn_like(x)
        mine, whole = (part.clone().requires_grad_() for part in (x[rank : rank + 1], x))
        y, _ = layer(mine)
        expected, _ = dropless(alone, whole)
        y.backward(grad[rank : rank + 1])
        expected.backward(grad)
        got_by_all: Any = whole.grad
        pairs: list[tuple[Any, Any]] = [
            (y, expected[rank : rank + 1]),
            (mine.grad, got_by_all[rank : rank + 1]),
        ]
        first = layer.experts.first
        for name, param in layer.experts.named_parameters():
            everyone = getattr(alone.experts, name)
            pairs.append((param.grad, everyone.grad[first : first + param.shape[0]]))
        for found, wanted in pairs:
            assert_same_sums(found, wanted)
        for param in itertools.chain(layer.parameters(), alone.parameters()):
            param.grad = None
    assert int(overflowed_tokens(layer)) == 0


@on_ranks("ranks2")
def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="the 2 ranks of expert_group do not divide the 3 exp"):
        MoE(8, 64, 3, expert_group=dist.group.WORLD)
