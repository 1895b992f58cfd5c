"""Two-axis meshes: cut over the inner ranks, repeated over the outer ones; or cut outside too."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import OpNames
from ranks import RankPool, on_ranks
from sharding_helpers import (
    ADAM_EPS,
    HYBRID_AXES,
    STRATEGIES,
    Net,
    Training,
    batches,
    buffers,
    full_parameters,
    hybrid_mesh,
    hybrid_net,
    my_part,
    num_steps_of,
    replayed_as_eager,
    shard,
)
from sharding_reference import assert_close_to_reference, reference

# Strategy inside, strategy outside.
PAIRS = [
    *((strategy, "no_shard") for strategy in STRATEGIES),
    *((strategy, "optim") for strategy in STRATEGIES[1:]),
]


def both_scopes(strategy: str, outer: str, microbatches: int, num_steps: int) -> Training:
    return replayed_as_eager(
        lambda: hybrid_net(strategy, outer), num_steps=num_steps, microbatches=microbatches
    )


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [("optim_grads", "no_shard"), ("optim_grads_params", "optim")],
)
def test_two_axes_train_as_one_rank_and_replay_as_eager(
    ranks4: RankPool, strategy: str, outer: str
) -> None:
    num_steps = num_steps_of(strategy, "optim_grads_params")
    results = ranks4.run(both_scopes, strategy, outer, 3, num_steps)
    assert_close_to_reference(results, reference(num_steps))


class Collectives(OpNames):
    """Counts collectives by the axis that they run over."""

    def __init__(self, mesh: DeviceMesh, model: Any) -> None:
        super().__init__()
        self._axes: dict[str, str] = {mesh.get_group(axis).group_name: axis for axis in HYBRID_AXES}
        for buffer in buffers(model):  # all-gathers have communicators of their own
            self._axes[buffer.gather_group.group_name] = self._axes[buffer.mesh.inner.group_name]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "graphfsdp" and func._opname != "wait_":
            group = next(arg for arg in args if isinstance(arg, str))
            self.counts[f"{func._opname} {self._axes[group]}"] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def collectives_of(strategy: str, outer: str) -> tuple[dict[str, int], int, int, int]:
    """Count forward and backward of three microbatches."""
    model = hybrid_net(strategy, outer)
    cut = sum(buffer.sharded for buffer in buffers(model))
    trainable = [buffer.sharded for buffer in buffers(model, trainable=True)]
    part = my_part(batches(1)[0])
    model.prepare_shards()
    seen = Collectives(hybrid_mesh(), model)
    with seen:
        for index in range(3):
            model.set_is_last_microbatch(index == 2)
            model(*(leaf[index : index + 1] for leaf in part)).backward()
            if index < 2:
                assert all(param.grad is None for param in model.parameters())
                assert not any("replicate" in key and "reduce" in key for key in seen.counts)
    assert any(param.grad is not None for param in model.parameters())
    return dict(seen.counts), cut, trainable.count(True), trainable.count(False)


@pytest.mark.parametrize(("strategy", "outer"), PAIRS)
def test_the_outer_axis_is_reduced_in_the_last_microbatch_only(
    ranks4: RankPool, strategy: str, outer: str
) -> None:
    for counts, cut, sharded, whole in ranks4.run(collectives_of, strategy, outer):
        inside = 3 if strategy in STRATEGIES[2:] else 1
        assert counts.get("reduce_scatter_ dp_shard", 0) == inside * sharded
        assert counts.get("all_reduce_ dp_shard", 0) == inside * whole
        if outer == "optim":
            assert counts["all_gather_ dp_replicate"] == cut  # once an iteration
            assert counts["reduce_scatter_ dp_replicate"] == sharded
            assert counts.get("all_reduce_ dp_replicate", 0) == whole
        else:
            assert "all_gather_ dp_replicate" not in counts
            assert "reduce_scatter_ dp_replicate" not in counts
            assert counts["all_reduce_ dp_replicate"] == sharded + whole


# Per backward pass: is it the last microbatch? "local": it runs under no_sync.
PASSES = ((True, True), (False, True), (True, False, True), ("local", True), ("local", False, True))


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
    plain: Any = Net().double()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    # What each rank adds up is the same; the factor of the last reduction is by kind of reduction.
    both = (strategy, outer) in (SUMMED[0], SUMMED[1], SUMMED[-1])
    axes: dict[str, Any] = {}
    if outer is not None:
        axes = {"mesh": hybrid_mesh(), "outer_strategy": outer}
    for reduction in ("mean", "sum") if both else ("mean",):
        model: Any = Net().double()
        model.load_state_dict(start)
        model = shard(model, strategy, gradient_reduction=reduction, **axes)
        for passes in PASSES:
            model.zero_grad()
            plain.zero_grad()
            for batch, last in zip(batches(len(passes)), passes, strict=True):
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
                        got.grad.full_tensor(), whole.grad * scale, rtol=1e-10, atol=1e-12
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


class Sometimes(Net):
    """Leaves a block out in the last of two microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks[1](self.embedding(tokens))
        if self.turn == 0:
            hidden = self.blocks[0](hidden)
        self.turn = 1 - self.turn
        out: Tensor = self.head(hidden) * self.scale
        return out


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [("optim", None), ("optim_grads", "no_shard"), ("optim_grads_params", "optim")],
)
@on_ranks("ranks4")
def test_a_unit_that_is_left_out_of_the_last_microbatch_is_reduced(
    strategy: str, outer: str | None
) -> None:
    axes: dict[str, Any] = {}
    if outer is not None:
        axes = {"mesh": hybrid_mesh(), "outer_strategy": outer}
    plain, model = (Sometimes().double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    shard(model, strategy, **axes)
    params = [param for param in plain.parameters() if param.requires_grad]
    optimizer = FusedAdam(params, lr=0.02, eps=ADAM_EPS)
    ours = FusedAdam([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=ADAM_EPS)
    with graphfsdp.capture(model, ours, scope="none", microbatches=2) as step:
        for batch in batches(4):
            optimizer.zero_grad()
            rows = torch.arange(len(batch[0])).view(dist.get_world_size(), -1)
            for half in rows[:, :2].chunk(2, dim=1):
                part = half.flatten()
                (plain(*(leaf[part] for leaf in batch)) / 2).backward()
            optimizer.step()
            step(*(leaf[:2] for leaf in my_part(batch)))
    expected = dict(plain.named_parameters())
    for name, whole in full_parameters(model).items():
        torch.testing.assert_close(whole, expected[name].detach(), rtol=1e-8, atol=1e-10)
