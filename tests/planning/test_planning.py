"""What `graphfsdp plan` says of memory and time, against real worlds of gloo ranks, and refuses."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.cli import main
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.plan import (
    CALL_S,
    DEVICES,
    NODE_S,
    Activations,
    Collective,
    Lives,
    TrainingPlan,
    Unit,
    run_without_numbers,
)
from graphfsdp.training.config import TrainConfig, parse_train_arguments
from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.loop import shard_model
from overlap_helpers import short_up_to
from ranks import RankPool
from sharding_helpers import buffers as sharded_buffers
from time_limits import until

H100 = DEVICES["h100"]

# Odd sizes, tied embeddings, biases; a block of it is laid out in one buffer.
SHAPE = GPTConfig(
    vocab_size=37,
    seq_length=5,
    num_layers=2,
    hidden_size=12,
    num_attention_heads=2,
    ffn_hidden_size=48,
)


def plan_of(line: str, num_ranks: int = 1) -> TrainingPlan:
    return TrainingPlan(parse_train_arguments(line.split()), num_ranks=num_ranks)


def measure(model: nn.Module, run: Callable[[], Tensor]) -> Activations:
    """As one unit that nobody cuts."""
    unit = Unit(model, tuple(model.parameters()), ())
    return run_without_numbers(run, [unit], stage=0)


def test_bytes_that_a_rank_sends_are_those_of_a_ring() -> None:
    assert Collective("all_gather", 2, 4_000_000, 4).wire_bytes == 6_000_000
    assert Collective("all_reduce", 1, 8, 4).wire_bytes == 12


def test_activations_are_what_lives_for_the_backward_pass() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.empty(16, 4)
    found = measure(model, lambda: model(x).sum())
    hidden, out, loss = 16 * 8 * 4, 16 * 4, 4
    assert found.saved_bytes == hidden + loss  # what tanh returned, and the loss itself
    # All gradients of the weights, while that of the hidden layer is there too.
    grads = (8 * 4 + 8 + 8 + 1) * 4
    assert hidden + loss + out < found.peak_bytes <= 3 * hidden + loss + 2 * out + grads
    assert all(param.grad is None for param in model.parameters())


def test_an_iteration_takes_less_than_its_parts_at_their_most() -> None:
    """Whole weights and gradients are few while the logits' gradient is there."""
    line = "--preset llama3-8b --num-layers 2 --bf16 --micro-batch-size 1 --global-batch-size 8"
    line += " --data-parallel-sharding-strategy optim_grads_params"
    plan = plan_of(line, 8)
    # Above the stand-in for a driver, torch's own allocator has counted 16,942 MiB.
    made = [
        line for line in plan.memory() if line.kind in ("whole weights and grads", "activations")
    ]
    assert round(sum(line.num_bytes for line in made) / 2**20) == 16_942


def test_weights_that_an_iteration_casts_are_a_line_of_their_own() -> None:
    plan = plan_of("--preset tiny --bf16", 2)
    (casts,) = (line for line in plan.memory() if line.kind == "cast weights")
    assert casts.num_bytes == 2 * plan.num_parameters


def test_attention_keeps_no_scores_and_each_layer_takes_the_same() -> None:
    def run(layers: int, positions: int) -> Activations:
        shape = dataclasses.replace(SHAPE, num_layers=layers, seq_length=positions, hidden_size=8)
        with torch.device("meta"):
            model = GPT(shape)
            tokens = torch.empty((1, positions), dtype=torch.int64)
        return measure(model, lambda: model(tokens, tokens))

    two, three, six = run(2, 64), run(3, 64), run(6, 64)
    assert six.saved_bytes - three.saved_bytes == 3 * (three.saved_bytes - two.saved_bytes)
    assert six.peak_bytes - three.peak_bytes == 3 * (three.peak_bytes - two.peak_bytes)
    assert run(2, 128).saved_bytes < 2.1 * two.saved_bytes  # scores would grow fourfold


def test_thousands_of_ranks_are_planned() -> None:
    line = "--preset llama3-8b --data-parallel-sharding-strategy optim_grads_params"
    plan = plan_of(line, 4096)
    assert (plan.num_parameters, len(plan.units)) == (8_030_261_248, 33)
    memory = {entry.kind: entry for entry in plan.memory()}
    whole = plan.num_parameters + plan.num_padding
    assert memory["main weights"].num_bytes == 4 * whole // 4096
    assert memory["main grads"].num_bytes == 4 * whole // 4096
    assert not memory["activations"].exact
    assert not memory["whole weights and grads"].exact
    # Both passes gather, but for the root, which stays whole between them.
    counts = Counter(call.op for call in plan.collectives() for _ in range(call.num_calls))
    root = len(plan.units[0].buffers)
    assert counts["all_gather"] == 2 * counts["reduce_scatter"] - root
    long, short = (plan_of(f"--preset tiny --seq-length {length}", 2) for length in (128, 64))
    assert short.flops < long.flops / 2


def test_command_prints_tables_that_mark_estimates_and_the_least_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["plan", "--preset", "tiny", "--world-size", "2", "--strategy", "optim_grads_params"])
        == 0
    )
    out = capsys.readouterr().out
    assert "tiny on 2 ranks, optim_grads_params" in out
    for word in ("main weights", "optimizer state", "whole weights", "reduce_scatter", "~ marks"):
        assert word in out
    activations = next(line for line in out.splitlines() if "activations" in line)
    assert "~" in activations
    assert "at least" not in out
    assert main(["plan", "--preset", "tiny", "--device", "h100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "captured (bound, not measured): arithmetic" in out


@pytest.mark.parametrize(("flag", "peak"), [("--bf16", 989e12), ("--no-bf16", 67e12)])
def test_a_plan_is_bound_by_what_it_counts(flag: str, peak: float) -> None:
    one = plan_of(f"--preset tiny {flag}")
    found = one.bound(H100)
    gaps = one.num_kernels * NODE_S
    assert found.arithmetic == pytest.approx(one.flops / peak + gaps)
    assert found.memory == pytest.approx(2 * one.total_bytes / 3.35e12 + gaps)
    assert found.host == pytest.approx(one.num_kernels * CALL_S)
    assert found.links == 0
    assert found.captured == max(found.arithmetic, found.memory) < found.host
    assert found._replace(arithmetic=0, memory=0).captured == CALL_S
    cut = plan_of(f"--preset tiny {flag} --data-parallel-sharding-strategy optim_grads_params", 2)
    assert cut.bound(H100).links > 0
    assert one.bound(DEVICES["b200"]).memory < found.memory


def test_micro_batches_and_layers_have_kernels_of_their_own() -> None:
    line = "--preset tiny --global-batch-size {} --micro-batch-size 1 --num-layers {}"
    one, four = plan_of(line.format(1, 2)), plan_of(line.format(4, 2))
    assert four.num_kernels >= 4 * one.num_kernels
    assert four.bound(H100).memory > one.bound(H100).memory
    deeper, deepest = plan_of(line.format(1, 3)), plan_of(line.format(1, 4))
    of_a_layer = deeper.num_kernels - one.num_kernels
    assert of_a_layer == deepest.num_kernels - deeper.num_kernels > 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--world-size 0", "--world-size must be at least 1, got 0"),
        ("--world-size two", "invalid int value"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_command_refuses_what_cannot_be(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *line.split()]) == 2
    assert message in capsys.readouterr().err


WRITERS = ("all_gather", "all_to_all")
NUM_WARMUPS = 4  # until all units know their order; then comes the capture
SEQUENCES = 2  # of a micro-batch


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
        return dataclasses.replace(parse_train_arguments(line.split()), **dataclasses.asdict(SHAPE))


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
    """Train for a few steps, and count; ``expected`` bytes of whole buffers are waited for."""
    torch.manual_seed(0)
    model = GPT(config.gpt())
    shard_model(model, config, torch.device("cpu"))
    microbatches = config.batch(dist.get_world_size()).num_microbatches
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
    plan = TrainingPlan(config, num_ranks=pool.num_ranks)
    found = pool.run(real_world, config, num_bytes(plan, "whole weights and grads"))
    for real in found:
        compare(plan, real)


def test_a_plan_takes_no_ranks_and_more_microbatches_than_two_take_no_more() -> None:
    few, many = (
        TrainingPlan(World("optim_grads_params", "--bf16", n).config(64), num_ranks=64)
        for n in (2, 50)
    )
    assert not dist.is_initialized()
    inputs = num_bytes(many, "static inputs") - num_bytes(few, "static inputs")
    assert many.total_bytes - few.total_bytes == inputs
