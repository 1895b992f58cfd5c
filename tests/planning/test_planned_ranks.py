"""What `graphfsdp plan` says, against real worlds of gloo ranks."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_planning import SHAPE
from torch import Tensor, nn

import graphfsdp
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.activations import Lives
from graphfsdp.planning.model_plan import ModelPlan, plan_model
from graphfsdp.planning.rehearsal import Collective
from graphfsdp.planning.training_plan import plan_training
from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.training.build import shard_model
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.gpt import GPT
from limits import until
from parallel_models import EP_AXES
from ranks import RankPool
from sharding_helpers import buffers as sharded_buffers
from sharding_helpers import hybrid_mesh

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "float8": MixedPrecisionPolicy(param_dtype=torch.bfloat16, gather_format="float8"),
    "rowwise": MixedPrecisionPolicy(gather_format="float8_rowwise"),
}
WRITERS = ("all_gather", "all_to_all")
NUM_WARMUPS = 4  # until all units know their order; then comes the capture
SEQUENCES = 2  # of a micro-batch


class World(NamedTuple):
    """``outer`` is the strategy of two instances, on four ranks; two ranks without."""

    model: str
    strategy: str
    policy: str = "bf16"
    microbatches: int = 1
    overlap: bool = True
    outer: str | None = None
    reshard: bool = True


WORLDS = [
    World("gpt", "no_shard", "fp32"),
    World("gpt", "optim", "bf16", 2),
    World("gpt", "optim", "bf16", 1, overlap=False),
    World("gpt", "optim_grads", "fp32", 4),
    World("gpt", "optim_grads_params"),
    World("gpt", "optim_grads_params", "bf16", 3),
    World("gpt", "optim_grads_params", "float8", 2),
    # In float32: what a reduction in bfloat16 is cast to lands in the main grads, which lie in one
    # storage for all units.
    World("gpt", "optim_grads_params", "fp32", 3, outer="no_shard"),
    World("gpt", "optim", "fp32", 2, outer="optim"),
    World("gpt", "optim_grads_params", "rowwise", 2, outer="optim"),
    World("stack", "no_shard"),
    World("stack", "optim"),
    World("stack", "optim", "fp32", 3, overlap=False),
    World("stack", "optim_grads", "bf16", 1, overlap=False),
    World("stack", "optim_grads", "fp32", 3),
    World("stack", "optim_grads_params"),
    World("stack", "optim_grads_params", overlap=False),
    World("stack", "optim_grads_params", "fp32", 3),
    World("stack", "optim_grads_params", "bf16", 3, overlap=False),
    World("stack", "optim_grads_params", "fp32", overlap=False, reshard=False),
    World("stack", "optim_grads_params", "fp32", overlap=False, outer="optim"),
    World("stack", "optim", "fp32", 3, outer="optim"),
    World("odd", "optim_grads_params", "fp32"),
    World("odd", "optim_grads_params", "bf16", 3),
    World("odd", "optim_grads", "fp32", 3, overlap=False),
]


class Stack(nn.Module):
    """Blocks of several parameters between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(3)
        )
        self.head = nn.Linear(12, 37)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(tokens[..., None].to(self.first.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


class Odd(nn.Module):
    """A unit that is left out, one that runs twice, one that is recomputed, frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 37)
        self.blocks[2].weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = (tokens[..., None] == torch.arange(12, device=tokens.device)).to(self.head.weight.dtype)
        for index in (3, 0, 2, 0):
            x = self.blocks[index](x).tanh()
        x = graphfsdp.recompute(self.blocks[3], x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


# A block of it is laid out in one buffer.
GPT_SHAPE = dataclasses.replace(SHAPE, ffn_hidden_size=48)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPT_SHAPE),
    "stack": Stack,
    "odd": Odd,
}


class Patient(Lives):
    """Waits for gloo's threads, which let go of a buffer a little late."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self._expected = expected

    def add(self, storage: torch.UntypedStorage) -> None:
        until(lambda: self.now() + storage.nbytes() <= self._expected, 0.5, pause_s=0.001)
        super().add(storage)


def storage_bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def real_world(world: World, expected: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = MODELS[world.model]()
    outer = world.outer or "no_shard"
    if world.overlap and world.reshard:
        shard_model(
            model,
            ShardingStrategy.parse(world.strategy),
            POLICIES[world.policy],
            num_instances=1 if world.outer is None else 2,
            outer_strategy=outer,
        )
    else:
        for module in (*model.blocks.children(), model):
            graphfsdp.fully_shard(
                module,
                None if world.outer is None else hybrid_mesh(),
                strategy=world.strategy,
                mp_policy=POLICIES[world.policy],
                outer_strategy=outer,
                overlap=world.overlap,
                reshard_after_forward=world.reshard,
            )
    return what_is_there(model, world.microbatches, expected)


def world_of_experts(config: TrainConfig, expected: int) -> dict[str, Any]:
    size = config.expert_model_parallel_size
    mesh = hybrid_mesh((dist.get_world_size() // size, size), EP_AXES)
    torch.manual_seed(0)
    model = GPT(config.gpt(37), mesh.get_group("ep"))
    shard_model(model, config.sharding, config.mp_policy, expert_mesh=mesh)
    return what_is_there(model, config.batch(dist.get_world_size()).num_microbatches, expected)


def what_is_there(model: nn.Module, microbatches: int, expected: int) -> dict[str, Any]:
    """Train for a few steps, and count; ``expected`` bytes of whole buffers are waited for."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    optimizer = FusedAdam([{"params": matrices}, {"params": vectors}])
    options: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": 1.0}
    lives, new_whole = Patient(expected), ShardBuffer.new_whole

    def counted(buffer: ShardBuffer, dtype: torch.dtype) -> Tensor:
        whole = new_whole(buffer, dtype)
        lives.add(whole.untyped_storage())
        return whole

    held = sharded_buffers(model)
    with (
        pytest.MonkeyPatch.context() as patch,
        graphfsdp.capture(model, optimizer, warmup_steps=NUM_WARMUPS, **options) as step,
    ):
        patch.setattr(ShardBuffer, "new_whole", counted)
        for buffer in held:
            if buffer.gradients is not None:
                patch.setattr(buffer.gradients, "_new_whole", buffer.new_whole)
        for _ in range(NUM_WARMUPS + 1):
            whole_bytes = lives.peak_bytes  # before the capture
            tokens = torch.randint(37, (SEQUENCES * microbatches, SHAPE.seq_length))
            step(tokens, tokens)
        report = step.report()
    buffers = report.buffers()
    collectives: Counter[tuple[str, int]] = Counter()
    for node in report.nodes():
        if node.kind.value == "collective":
            op = node.op.split(".")[1].removesuffix("_")
            if op == "wait":  # of a collective that was begun before
                continue
            # The whole buffer is what gathers and exchanges write and what a reduction reads. Main
            # grads, which a reduction may write, lie in a storage with those of other units.
            seen = (node.writes, node.reads) if op in WRITERS else (node.reads, node.writes)
            sizes = [buffers[number].num_bytes for number in seen[0] or seen[1]]
            collectives[op, max(sizes)] += 1
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "main": storage_bytes([buffer.main for buffer in held]),
        "grads": storage_bytes([buffer.grad for buffer in held if buffer.grad is not None]),
        "states": storage_bytes([getattr(s, "_local_tensor", s) for s in states]),
        "collectives": collectives,
        "buffers": [(b.layout, b.sharded, b.dtypes) for b in held],
        "whole": whole_bytes,
    }


def planned(world: World, num_ranks: int = 2, rank: int = 0) -> ModelPlan:
    with torch.device("meta"):
        model: Any = MODELS[world.model]()
        tokens = torch.empty((SEQUENCES, SHAPE.seq_length), dtype=torch.int64)
    return plan_model(
        model,
        [f"blocks.{index}" for index in range(len(model.blocks))],
        lambda copy: copy(tokens, tokens),
        num_ranks=num_ranks,
        rank=rank,
        num_outer=1 if world.outer is None else 2,
        cuts_outside=world.outer == "optim",
        strategy=world.strategy,
        mp_policy=POLICIES[world.policy],
        num_microbatches=world.microbatches,
        overlap=world.overlap,
        reshard_after_forward=world.reshard,
    )


def what_is_planned(plan: ModelPlan, calls: Sequence[Collective]) -> dict[str, Any]:
    collectives: Counter[tuple[str, int]] = Counter()
    for call in calls:
        collectives[call.op, call.buffer_bytes] += call.count
    return {
        "main": plan.main_weight_bytes,
        "grads": plan.main_grad_bytes,
        "states": plan.state_bytes,
        "collectives": collectives,
        "buffers": [(b.layout, b.sharded, b.dtypes) for b in plan.buffers],
        "whole": plan.whole.whole_bytes,
    }


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "-".join(map(str, world)))
def test_a_plan_is_what_ranks_really_hold(world: World, ranks2: RankPool, ranks4: RankPool) -> None:
    pool = ranks2 if world.outer is None else ranks4
    plans = [planned(world, pool.num_ranks, rank) for rank in range(pool.num_ranks)]
    found = pool.run(real_world, world, plans[0].whole.whole_bytes)
    for plan, real in zip(plans, found, strict=True):
        expected = what_is_planned(plan, plan.collectives)
        if world.model == "odd":  # of what a unit holds that never runs there is no state
            assert real.pop("states") < expected.pop("states")
        assert real == expected


def test_a_plan_is_what_ranks_that_share_experts_out_really_hold(ranks4: RankPool) -> None:
    shape = dataclasses.replace(
        SHAPE, num_experts=4, moe_router_bias_update_rate=0.1, moe_expert_capacity_factor=1.5
    )
    config = TrainConfig(
        **vars(shape),
        expert_model_parallel_size=2,
        micro_batch_size=SEQUENCES,
        global_batch_size=SEQUENCES * 8,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    plans = [plan_training(config, num_ranks=4, rank=rank) for rank in range(4)]
    found = ranks4.run(world_of_experts, config, plans[0].model.whole.whole_bytes)
    for plan, real in zip(plans, found, strict=True):
        assert real == what_is_planned(plan.model, plan.collectives())
    whole = sum(param.numel() for param in GPT(config.gpt(37)).parameters())
    assert plans[0].model.num_parameters == whole


def test_units_that_overlap_hold_more_and_cut_weights_less() -> None:
    sizes = [
        planned(world).whole.whole_bytes
        for world in (
            World("stack", "no_shard"),
            World("stack", "optim_grads_params", overlap=False),
            World("stack", "optim_grads_params"),
            World("stack", "optim"),
        )
    ]
    assert sizes[0] == 0
    assert sizes == sorted(set(sizes))


def test_a_plan_touches_neither_the_model_nor_torch() -> None:
    model = Odd()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    tokens = torch.empty((2, 5), dtype=torch.int64, device="meta")
    plan = plan_model(model, ["blocks.0"], lambda copy: copy(tokens, tokens), num_ranks=64)
    assert plan.whole.whole_bytes > 0
    assert not dist.is_initialized()
    assert type(model) is Odd
    assert all(not module._forward_pre_hooks for module in model.modules())
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.grad is None


def test_more_microbatches_than_three_take_no_more_memory() -> None:
    few, many = (planned(World("stack", "optim_grads_params", "bf16", n)) for n in (3, 50))
    assert few.whole.whole_bytes == many.whole.whole_bytes
