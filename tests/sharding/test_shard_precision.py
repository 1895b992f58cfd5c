"""Dtypes of sharded weights and gradients: what a policy says is rounded, and nothing else."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import MixedPrecisionPolicy
from ranks import on_ranks, rank_device
from sharding_helpers import make_net, num_steps_of, replayed_as_eager

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Precision:
    """A policy, and the dtype in which the model comes."""

    policy: MixedPrecisionPolicy
    model: torch.dtype = FP32

    @property
    def main(self) -> torch.dtype:
        return self.policy.main_params_dtype or self.model

    @property
    def compute(self) -> torch.dtype:
        return self.policy.param_dtype or self.model

    @property
    def grad(self) -> torch.dtype:
        return self.policy.main_grads_dtype or self.main

    @property
    def comm(self) -> torch.dtype:
        return self.policy.grad_comm_dtype or self.grad


PRECISIONS = {
    "bf16_compute": Precision(MixedPrecisionPolicy(param_dtype=BF16)),
    "bf16_grads": Precision(
        MixedPrecisionPolicy(param_dtype=BF16, main_grads_dtype=BF16, use_decoupled_grad=True)
    ),
    "bf16_comm": Precision(MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16)),
    "fp16_comm": Precision(MixedPrecisionPolicy(grad_comm_dtype=FP16)),
    "fp32_comm": Precision(
        MixedPrecisionPolicy(main_grads_dtype=BF16, grad_comm_dtype=FP32, use_decoupled_grad=True)
    ),
    "bf16_model": Precision(MixedPrecisionPolicy(main_params_dtype=FP32), model=BF16),
    "all_bf16": Precision(MixedPrecisionPolicy(), model=BF16),
}


class Probe(nn.Module):
    """Shows its weight as it computes with it; a batch is that weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight, (self.weight * grad).sum()


def reduced_by_hand(grads: Tensor, precision: Precision, strategy: str) -> Tensor:
    """Return the mean over ranks of gradients [microbatch, rank, ...], rounded as is said."""
    sent = grads.to(precision.compute).to(precision.comm)
    if strategy in ("no_shard", "optim"):  # once, what microbatches have added up
        sent = _sum(sent)[None]
    return _sum((sent.sum(1) / dist.get_world_size()).to(precision.grad))


def _sum(terms: Tensor) -> Tensor:
    """Add one after the other, each sum rounded."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def gradients_are_rounded_as_is_said(precision: Precision, strategy: str, num_parts: int) -> None:
    """With two ranks a + b is b + a, so nothing depends on the order of additions."""
    torch.manual_seed(0)
    probe = Probe().to(rank_device(), precision.model)
    weight = probe.weight.detach().clone()
    model: Any = graphfsdp.fully_shard(probe, strategy=strategy, mp_policy=precision.policy)
    grads = torch.randn(num_parts, dist.get_world_size(), *weight.shape).to(rank_device())
    for index, part in enumerate(grads[:, dist.get_rank()]):
        model.set_is_last_microbatch(index + 1 == num_parts)
        shown, loss = model(part)
        assert shown.dtype == precision.compute
        assert torch.equal(shown, weight.to(precision.main).to(precision.compute))
        loss.backward()
    kinds = ["grad", "decoupled_grad"]
    if precision.policy.use_decoupled_grad:
        kinds.reverse()
    assert getattr(model.weight, kinds[1], None) is None
    found = getattr(model.weight, kinds[0]).full_tensor()
    expected = reduced_by_hand(grads, precision, strategy)
    assert found.dtype == expected.dtype == precision.grad
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "strategy", "microbatches"),
    [
        ("bf16_compute", "optim_grads_params", 1),
        ("fp16_comm", "no_shard", 1),
        ("fp32_comm", "optim_grads_params", 1),
        ("bf16_model", "no_shard", 1),
        ("bf16_model", "optim_grads_params", 1),
        ("all_bf16", "optim", 1),
        # What is rounded in each microbatch and what at last: by strategy.
        *(("bf16_grads", strategy, 3) for strategy in ("no_shard", "optim_grads")),
        *(("bf16_comm", strategy, 3) for strategy in ("optim", "optim_grads_params")),
    ],
)
@on_ranks("ranks2")
def test_a_policy_does_what_it_says(name: str, strategy: str, microbatches: int) -> None:
    precision = PRECISIONS[name]
    gradients_are_rounded_as_is_said(precision, strategy, microbatches)
    got = replayed_as_eager(
        partial(make_net, strategy, dtype=precision.model, mp_policy=precision.policy),
        num_steps=num_steps_of(strategy, "optim_grads_params"),
        microbatches=microbatches,
        max_grad_norm=None,
    )
    assert all(param.dtype == precision.main for param in got.params.values())
    assert min(float(loss) for loss in got.losses) < float(got.losses[0])


@on_ranks("ranks2")
def test_each_unit_has_main_grads_of_its_own_dtype() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(rank_device())
    for layer, dtype in zip(model, (BF16, FP32), strict=True):
        policy = MixedPrecisionPolicy(main_grads_dtype=dtype, use_decoupled_grad=True)
        graphfsdp.fully_shard(layer, mp_policy=policy)
    graphfsdp.fully_shard(model)(torch.ones(2, 4, device=rank_device())).sum().backward()
    found = [layer.weight.decoupled_grad.dtype for layer in model]
    assert found == [BF16, FP32]
