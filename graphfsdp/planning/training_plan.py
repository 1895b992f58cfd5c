"""The plan of a training run of the command line: memory, collectives, time."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from graphfsdp.command_line import require
from graphfsdp.config import ShardingStrategy
from graphfsdp.data import BYTES_VOCAB_SIZE
from graphfsdp.errors import ConfigError
from graphfsdp.planning.model_plan import ModelPlan, plan_model
from graphfsdp.planning.pipeline_plan import (
    GPTPart,
    PipelinePlan,
    activation_bytes,
    num_in_flight,
)
from graphfsdp.planning.rehearsal import EXPERTS, Collective, RunForward, planned_ranks
from graphfsdp.training.batch import IterationBatch
from graphfsdp.training.build import make_model
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.gpt import GPT
from graphfsdp.training.metrics import flops_per_token

_TOKEN_BYTES = 8
_COUNT_BYTES = 8  # of an expert's tokens, an int64
_MICRO = 1e-6
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True)
class Speeds:
    """What the machines are taken to do, each GPU and rank for itself; each field is a flag.

    Bandwidth is while all ranks send; utilization while a GPU computes (MFU).
    """

    tflops: Annotated[float, "matrix arithmetic of one GPU, TFLOP/s"] = 989.0
    utilization: Annotated[float, "share of it that is reached"] = 0.4
    bandwidth_gbs: Annotated[float, "1e9 bytes that each rank sends per second"] = 50.0
    latency_us: Annotated[float, "microseconds of one step of a ring"] = 5.0

    def __post_init__(self) -> None:
        for name in ("tflops", "bandwidth_gbs"):
            require(name, getattr(self, name), getattr(self, name) > 0, "greater than 0")
        require("utilization", self.utilization, 0 < self.utilization <= 1, "in (0, 1]")
        require("latency_us", self.latency_us, self.latency_us >= 0, "at least 0")


@dataclass(frozen=True)
class TimeEstimate:
    """Milliseconds of one iteration, all collectives one after the other."""

    compute_ms: float
    communication_ms: float

    @property
    def overlapped_ms(self) -> float:
        """If communication hides behind arithmetic as far as it can: no iteration is faster."""
        return max(self.compute_ms, self.communication_ms)

    @property
    def serial_ms(self) -> float:
        return self.compute_ms + self.communication_ms


def estimate_time(flops: float, collectives: Iterable[Collective], speeds: Speeds) -> TimeEstimate:
    """Return the time of an iteration, from the arithmetic of one rank in it.

    Source: Thakur et al. 2005, section 3 (ring algorithms): an all-gather or reduce-scatter of
        B bytes on R ranks takes (R - 1) latencies and (R - 1) / R of B at the bandwidth of one
        rank, an all-reduce twice that.
    """
    compute_s = flops / (speeds.tflops * _TERA * speeds.utilization)
    communication_s = 0.0
    for call in collectives:
        steps = (call.num_ranks - 1) * (2 if call.op == "all_reduce" else 1) * call.count
        communication_s += steps * speeds.latency_us * _MICRO
        communication_s += call.wire_bytes / (speeds.bandwidth_gbs * _GIGA)
    return TimeEstimate(compute_s * 1e3, communication_s * 1e3)


@dataclass(frozen=True)
class MemoryLine:
    kind: str
    num_bytes: int
    exact: bool  # the layout decides it to the byte; else it is an estimate
    note: str  # how it comes about


@dataclass(frozen=True)
class TrainingPlan:
    config: TrainConfig
    model: ModelPlan
    batch: IterationBatch
    rank: int  # whose optimizer state is counted; all else is equal on every rank
    stage_bytes: int | None  # activations on a rank of a pipeline, estimated
    flops: int  # of one rank in one iteration
    speeds: Speeds
    time: TimeEstimate  # from these speeds
    pipeline: PipelinePlan | None = None

    def collectives(self) -> tuple[Collective, ...]:
        """Return what ranks do together in one iteration, the experts' exchanges included."""
        return (*self.model.collectives, *_balance(self.config, self.batch))

    def memory(self) -> tuple[MemoryLine, ...]:
        model, batch = self.model, self.batch
        inputs = 2 * _TOKEN_BYTES * batch.num_tokens // batch.num_ranks
        return (
            MemoryLine("main weights", model.main_weight_bytes, True, "what the optimizer updates"),
            MemoryLine("main grads", model.main_grad_bytes, True, "persistent gradient buffers"),
            MemoryLine("optimizer state", model.state_bytes, True, "two moments, step counts"),
            MemoryLine("model's own buffers", model.module_buffer_bytes, True, "such as tables"),
            MemoryLine("static inputs", inputs, True, "tokens and targets of an iteration"),
            *_whole_lines(model),
            *self._of_pipeline(),
            self._activations(),
        )

    def _activations(self) -> MemoryLine:
        if self.stage_bytes is not None:
            rank = self.rank // self.batch.num_ranks
            count = num_in_flight(self.config, self.batch, rank)
            note = f"of {count:.3g} micro-batches that wait for their backward pass"
            return MemoryLine("activations", self.stage_bytes, False, note)
        # What an iteration takes besides; few weights are whole when activations are most.
        model, whole = self.model, self.model.whole
        others = whole.whole_bytes + model.cast_bytes + model.unreduced_outside_bytes
        num_bytes = max(0, whole.iteration_bytes - others)
        return MemoryLine("activations", num_bytes, False, "when all of it is most")

    def _of_pipeline(self) -> Iterator[MemoryLine]:
        is_cut = self.model.strategy is not ShardingStrategy.NO_SHARD and self.batch.num_ranks > 1
        if self.config.pipeline_model_parallel_size > 1 and is_cut:
            num_bytes = self.model.num_parameters * self.config.param_dtype.itemsize
            note = "whole ones, reduced after the last micro-batch"
            yield MemoryLine("grads of a pipeline", num_bytes, False, note)

    @property
    def total_bytes(self) -> int:
        """All of it together: an estimate, since the activations are one."""
        return sum(line.num_bytes for line in self.memory())

    def to_dict(self) -> dict[str, Any]:
        model = self.model
        return {
            "preset": self.config.preset,
            "num_ranks": model.num_ranks,
            "strategy": model.strategy.value,
            "num_outer_ranks": model.mesh.num_outer,
            "cuts_outside": model.mesh.cuts_outside,
            "num_units": len(model.units),
            "num_parameters": model.num_parameters,
            "num_padding": model.num_padding,
            "num_microbatches": model.num_microbatches,
            "tokens_per_iteration": self.batch.num_tokens,
            "rank": self.rank,
            "memory": [dataclasses.asdict(line) for line in self.memory()],
            "total_bytes": self.total_bytes,
            "whole": dataclasses.asdict(model.whole),
            "collectives": [
                dataclasses.asdict(call) | {"wire_bytes": call.wire_bytes}
                for call in self.collectives()
            ],
            "speeds": dataclasses.asdict(self.speeds),
            "flops": self.flops,
            "pipeline": None
            if self.pipeline is None
            else dataclasses.asdict(self.pipeline) | {"bubble": self.pipeline.bubble},
            "time": {
                "compute_ms": self.time.compute_ms,
                "communication_ms": self.time.communication_ms,
                "overlapped_ms": self.time.overlapped_ms,
                "serial_ms": self.time.serial_ms,
            },
        }


def plan_training(
    config: TrainConfig,
    *,
    num_ranks: int,
    rank: int = 0,
    speeds: Speeds | None = None,
    with_stages: bool = True,
) -> TrainingPlan:
    """Plan without a GPU, without ranks and without the run's memory.

    ``num_ranks`` counts all machines; ``rank`` is the one whose optimizer state, and whose stages
    of a pipeline, are counted. ``with_stages``: tell what the ranks of the other stages need too.
    """
    batch = config.batch(num_ranks)
    vocab_size = config.vocab_size or BYTES_VOCAB_SIZE
    model = _make_model(config, vocab_size, config.main_dtype)
    part: GPT | GPTPart = model
    units = [f"blocks.{index}" for index in range(config.num_layers)]
    num_expert_ranks = config.expert_model_parallel_size
    if num_ranks % num_expert_ranks:
        raise ConfigError(
            f"--expert-model-parallel-size {num_expert_ranks} does not divide --world-size "
            f"{num_ranks}"
        )
    experts = [f"{unit}.ffn.experts" for unit in units] if num_expert_ranks > 1 else []
    run, is_cut = _forward_of(config), config.pipeline_model_parallel_size > 1
    if is_cut:
        part = GPTPart(config, vocab_size, config.main_dtype, rank // batch.num_ranks)
        units, run = part.units, _forward_of(config, with_targets=False)
    plan = plan_model(
        part,
        [*experts, *units],
        run,
        num_ranks=batch.num_ranks,
        rank=rank % batch.num_ranks,
        num_outer=config.num_distributed_optimizer_instances,
        cuts_outside=config.outer_dp_sharding_strategy == "optim",
        expert_units=experts,
        num_expert_ranks=num_expert_ranks,
        strategy=config.sharding,
        mp_policy=config.mp_policy,
        # Those of a pipeline gather and reduce once for all.
        num_microbatches=1 if is_cut else batch.num_microbatches,
    )
    flops = flops_per_token(model) * batch.num_tokens // num_ranks
    used = speeds or Speeds()
    pipeline = _pipeline(config, batch, num_ranks) if is_cut and with_stages else None
    time = estimate_time(flops, (*plan.collectives, *_balance(config, batch)), used)
    if pipeline is not None:
        time = dataclasses.replace(time, compute_ms=time.compute_ms / (1 - pipeline.bubble))
    return TrainingPlan(
        config=config,
        model=plan,
        batch=batch,
        rank=rank,
        stage_bytes=activation_bytes(config, vocab_size, batch, part.rank)
        if isinstance(part, GPTPart)
        else None,
        flops=flops,
        speeds=used,
        time=time,
        pipeline=pipeline,
    )


def _pipeline(config: TrainConfig, batch: IterationBatch, num_ranks: int) -> PipelinePlan:
    size = config.pipeline_model_parallel_size
    plan = functools.partial(plan_training, config, num_ranks=num_ranks, with_stages=False)
    return PipelinePlan(
        size=size,
        num_virtual=config.num_virtual_stages,
        num_microbatches=batch.num_microbatches,
        message_bytes=config.micro_batch_size
        * config.seq_length
        * config.hidden_size
        * config.param_dtype.itemsize,
        totals=tuple(plan(rank=rank * batch.num_ranks).total_bytes for rank in range(size)),
    )


def _make_model(config: TrainConfig, vocab_size: int, dtype: torch.dtype) -> GPT:
    """Return the model of the first rank, without memory."""
    group = planned_ranks(config.expert_model_parallel_size, EXPERTS)
    return make_model(config, vocab_size, torch.device("meta"), dtype, group)


def _balance(config: TrainConfig, batch: IterationBatch) -> Iterator[Collective]:
    """Yield what routers ask of all ranks once an iteration, to move their biases."""
    if config.num_experts is not None and config.moe_router_bias_update_rate:
        num_bytes = _COUNT_BYTES * config.num_experts
        routers = "tokens of all ranks, for the bias"
        yield Collective("all_reduce", routers, config.num_layers, num_bytes, batch.num_ranks)


def _forward_of(config: TrainConfig, *, with_targets: bool = True) -> RunForward:
    batch = (config.micro_batch_size, config.seq_length)
    tokens = torch.empty(batch, dtype=torch.int64, device="meta")
    batch_of_tokens = (tokens, tokens, *([tokens] if config.has_positions else []))
    return lambda model: model(*batch_of_tokens) if with_targets else model(tokens)


def _whole_lines(model: ModelPlan) -> Iterator[MemoryLine]:
    note = "gathered, or not reduced yet; the most at one time"
    yield MemoryLine("whole weights and grads", model.whole.whole_bytes, True, note)
    if casts := model.cast_bytes + model.packed_bytes:
        note = "weights in the dtype of the computation that stay for an iteration"
        yield MemoryLine("cast weights", casts, True, note)
    if model.unreduced_outside_bytes:
        note = "reduced over the inner axis alone"
        yield MemoryLine("grads for the outer axis", model.unreduced_outside_bytes, False, note)
