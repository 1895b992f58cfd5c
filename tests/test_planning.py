"""What `graphfsdp plan` says, against real worlds of gloo ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp._fully_shard import unit_of
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.model_plan import ModelPlan, plan_model
from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.sharding import shard_model
from ranks import RankPool
from sharding_helpers import STRATEGIES

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}
NUM_CALLS = 6
SEQUENCES, POSITIONS = 4, 5


def make_model(device: str) -> GPT:
    """Odd sizes, tied embeddings, biases; on the meta device nothing is allocated."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(
            GPTConfig(
                vocab_size=37,
                seq_length=POSITIONS,
                num_layers=2,
                hidden_size=12,
                num_attention_heads=2,
                ffn_hidden_size=29,
            )
        )


def storage_bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def real_world(strategy: str, policy_name: str, microbatches: int) -> dict[str, Any]:
    """Train for a few steps, and count what is there."""
    model = make_model("cpu")
    shard_model(model, strategy, POLICIES[policy_name])  # type: ignore[arg-type]
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    optimizer = FusedAdam([{"params": matrices}, {"params": vectors}])
    with graphfsdp.capture(model, optimizer, microbatches=microbatches, max_grad_norm=1.0) as step:
        for _ in range(NUM_CALLS):
            tokens = torch.randint(37, (SEQUENCES, POSITIONS))
            step(tokens, tokens)
        report = step.report()
    buffers = report.buffers()
    collectives: Counter[tuple[str, int]] = Counter()
    for node in report.nodes():
        if node.kind.value == "collective":
            op = node.op.split(".")[1].removesuffix("_")
            # The whole buffer is what an all-gather writes and what a reduction reads or writes.
            sizes = [buffers[number].num_bytes for number in (*node.writes, *node.reads)]
            collectives[op, max(sizes)] += 1
    units = [unit_of(m) for m in model.modules() if isinstance(m, graphfsdp.FSDPModule)]
    held = [buffer for unit in units for buffer in unit.group.buffers]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "main": storage_bytes([buffer.main for buffer in held]),
        "grads": storage_bytes([buffer.grad for buffer in held if buffer.grad is not None]),
        "states": storage_bytes([getattr(s, "_local_tensor", s) for s in states]),
        "collectives": collectives,
        "buffers": [(b.layout, b.sharded, b.dtypes) for b in held],
    }


def plan_of(strategy: str, policy: str, microbatches: int, num_ranks: int) -> ModelPlan:
    model = make_model("meta")
    units = [f"blocks.{index}" for index in range(2)]
    return plan_model(
        model,
        units,
        num_ranks=num_ranks,
        strategy=strategy,
        mp_policy=POLICIES[policy],
        num_microbatches=microbatches,
    )


def check(pool: RankPool, num_ranks: int, strategy: str, policy: str, microbatches: int) -> None:
    plan = plan_of(strategy, policy, microbatches, num_ranks)
    for rank, real in enumerate(pool.run(real_world, strategy, policy, microbatches)):
        assert real["buffers"] == [(b.layout, b.sharded, b.dtypes) for b in plan.buffers]
        assert real["main"] == plan.main_weight_bytes
        assert real["grads"] == plan.main_grad_bytes
        assert real["states"] == plan.state_bytes(rank)
        planned: Counter[tuple[str, int]] = Counter()
        for call in plan.collectives():
            planned[call.op, call.buffer_bytes] += call.count
        assert real["collectives"] == planned


@pytest.mark.parametrize(
    ("strategy", "policy", "microbatches"),
    [
        *((strategy, "bf16", 2) for strategy in STRATEGIES),
        ("no_shard", "fp32", 1),
        ("optim_grads_params", "fp32", 1),
    ],
)
def test_plan_is_what_two_ranks_really_hold(
    ranks2: RankPool, strategy: str, policy: str, microbatches: int
) -> None:
    check(ranks2, 2, strategy, policy, microbatches)


def test_plan_is_what_four_ranks_really_hold(ranks4: RankPool) -> None:
    check(ranks4, 4, "optim_grads_params", "bf16", 2)


def test_a_plan_needs_modules_and_ranks_that_exist() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no module 'blocks'"):
        plan_model(model, ["blocks"], num_ranks=2)
    with pytest.raises(ConfigError, match="at least 1, got 0 and 1"):
        plan_model(model, ["0"], num_ranks=0)
    assert not dist.is_initialized()
