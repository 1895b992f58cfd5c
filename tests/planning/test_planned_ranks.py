"""What `graphfsdp plan` says, against real worlds of gloo ranks."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_planning import SHAPE, of_shape
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.activations import Lives
from graphfsdp.planning.plan import TrainingPlan, plan_training
from graphfsdp.training.build import shard_model
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.gpt import GPT
from overlap_helpers import short_up_to
from ranks import RankPool
from sharding_helpers import buffers as sharded_buffers
from time_limits import until

WRITERS = ("all_gather", "all_to_all")
NUM_WARMUPS = 4  # until all units know their order; then comes the capture
SEQUENCES = 2  # of a micro-batch
# A block of it is laid out in one buffer.
GPT_SHAPE = dataclasses.replace(SHAPE, ffn_hidden_size=48)


class World(NamedTuple):
    """``outer`` is the strategy of two instances, on four ranks; two ranks without."""

    strategy: str
    flags: str = "--bf16"
    microbatches: int = 1
    outer: str | None = None

    def config(self, num_ranks: int) -> TrainConfig:
        outer = ""
        if self.outer is not None:
            outer = "--num-distributed-optimizer-instances 2 "
            outer += f"--outer-dp-sharding-strategy {self.outer}"
        line = f"--micro-batch-size {SEQUENCES} "
        line += f"--global-batch-size {SEQUENCES * self.microbatches * num_ranks} "
        line += f"--data-parallel-sharding-strategy {self.strategy} {self.flags} {outer}"
        return of_shape(line, GPT_SHAPE)


WORLDS = [
    World("no_shard", ""),
    World("no_shard"),
    World("no_shard", "", 3),
    World("optim", "--bf16", 2),
    World("optim"),
    World("optim", "", 3),
    World("optim_grads", "", 4),
    World("optim_grads"),
    World("optim_grads_params"),
    World("optim_grads_params", ""),
    World("optim_grads_params", "--bf16", 3),
    # In float32: what a reduction in bfloat16 is cast to lands in the main grads, which lie in one
    # storage for all units.
    World("optim_grads_params", "", 3, "no_shard"),
    World("optim", "", 2, "optim"),
    World("optim_grads_params", "", 1, "optim"),
]


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


def real_world(config: TrainConfig, expected: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(config.gpt(37))
    shard_model(model, config, torch.device("cpu"))
    return what_is_there(model, config.batch(dist.get_world_size()).num_microbatches, expected)


def what_is_there(model: nn.Module, microbatches: int, expected: int) -> dict[str, Any]:
    """Train for a few steps, and count; ``expected`` bytes of whole buffers are waited for."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    optimizer = FusedAdam([{"params": matrices}, {"params": vectors}])
    options: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": 1.0}
    held = sharded_buffers(model)
    lives, kind_of_buffer = Patient(expected), type(held[0])
    new_whole = kind_of_buffer.new_whole

    def counted(buffer: Any, dtype: torch.dtype) -> Tensor:
        whole = new_whole(buffer, dtype)
        lives.add(whole.untyped_storage())
        return whole

    with (
        short_up_to(0),  # a plan counts units as large as those of models that need one
        pytest.MonkeyPatch.context() as patch,
        graphfsdp.capture(model, optimizer, warmup_steps=NUM_WARMUPS, **options) as step,
    ):
        patch.setattr(kind_of_buffer, "new_whole", counted)
        for index in range(NUM_WARMUPS + 1):
            if index == NUM_WARMUPS:  # what counts in an iteration is refused
                patch.undo()
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


def num_bytes(plan: TrainingPlan, kind: str) -> int:
    return sum(line.num_bytes for line in plan.memory() if line.kind == kind)


def compare(plan: TrainingPlan, real: dict[str, Any]) -> None:
    collectives: Counter[tuple[str, int]] = Counter()
    for call in plan.collectives():
        collectives[call.op, call.buffer_bytes] += call.num_calls
    buffers = [(b.layout, b.sharded, b.dtypes) for u in plan.units for b in u.buffers]
    # The layout's padding has no state, and each tensor of a state starts on a border of its own.
    count = sum(len(layout.slots) for layout, _, _ in buffers)
    states = num_bytes(plan, "optimizer state")
    assert real.pop("states") == pytest.approx(states, rel=0.02, abs=300 * count)
    assert real == {
        "main": num_bytes(plan, "main weights"),
        "grads": num_bytes(plan, "main grads"),
        "collectives": collectives,
        "buffers": buffers,
        "whole": num_bytes(plan, "whole weights and grads"),
    }


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "-".join(map(str, world)))
def test_a_plan_is_what_ranks_really_hold(world: World, ranks2: RankPool, ranks4: RankPool) -> None:
    pool = ranks2 if world.outer is None else ranks4
    config = world.config(pool.num_ranks)
    plan = plan_training(config, num_ranks=pool.num_ranks)
    found = pool.run(real_world, config, num_bytes(plan, "whole weights and grads"))
    for real in found:
        compare(plan, real)


def test_a_plan_takes_no_ranks_and_more_microbatches_than_two_take_no_more() -> None:
    few, many = (
        plan_training(World("optim_grads_params", "--bf16", n).config(64), num_ranks=64)
        for n in (2, 50)
    )
    assert not dist.is_initialized()
    inputs = num_bytes(many, "static inputs") - num_bytes(few, "static inputs")
    assert many.total_bytes - few.total_bytes == inputs
