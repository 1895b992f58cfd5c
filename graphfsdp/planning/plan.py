"""What each rank of a training run will need: memory, and what goes over each link.

What lies on a rank and what goes over each link is arithmetic on the layout of ``fully_shard``.
Activations, and the whole weights and gradients beside them, are an estimate (``activations.py``).
Nothing here has memory or needs ranks.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.memory_plan import neighbour_starts
from graphfsdp.data import BYTES_VOCAB_SIZE
from graphfsdp.planning.activations import Activations, WholeUnit, run_without_numbers
from graphfsdp.planning.roofline import Bound, Device, bound
from graphfsdp.sharding.plan import BufferPlan, ParameterKind, linear_weights, plan_buffers
from graphfsdp.training.build import make_model
from graphfsdp.training.config import IterationBatch, TrainConfig
from graphfsdp.training.gpt import GPT
from graphfsdp.training.metrics import flops_per_token

ROOT = "(root)"
_TOKEN_BYTES, _NORM_BYTES, _SCALE_BYTES = 8, 8, 4
_STATE_BYTES = 8  # FusedAdam's two moments of an element, in float32


@dataclass(frozen=True)
class Collective:
    """What ranks do together, ``count`` times in one iteration.

    ``buffer_bytes`` are of the whole buffer of one call, padding included.
    """

    op: str
    unit: str
    count: int
    buffer_bytes: int
    num_ranks: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in one iteration, as a ring does it."""
        rounds = 2 if self.op == "all_reduce" else 1
        return self.count * rounds * self.buffer_bytes * (self.num_ranks - 1) // self.num_ranks


@dataclass(frozen=True)
class MemoryLine:
    kind: str
    num_bytes: int
    exact: bool  # the layout decides it to the byte; else it is an estimate
    note: str  # how it comes about


@dataclass(frozen=True)
class Axes:
    """The ranks that units are cut over, and how many times that is repeated.

    With ``cuts_outside`` the optimizer state is cut over the outer axis too.
    """

    inner: int
    outer: int
    cuts_outside: bool

    @classmethod
    def of(cls, config: TrainConfig, num_ranks: int) -> "Axes":
        outer = config.num_distributed_optimizer_instances
        cuts_outside = config.outer_dp_sharding_strategy == "optim" and outer > 1
        return cls(num_ranks // outer, outer, cuts_outside)

    @property
    def cut(self) -> list[int]:
        """Sizes of the axes along which ranks hold other elements."""
        return [self.inner, self.outer] if self.cuts_outside else [self.inner]


@dataclass(frozen=True)
class UnitPlan:
    """A module that is sharded by itself."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[BufferPlan, ...]

    @property
    def grad_bytes(self) -> int:
        """Bytes of whole gradients on their way to the main grads."""
        return sum(
            buffer.layout.total_numel * buffer.dtypes.comm.itemsize
            for buffer in self.buffers
            if buffer.trainable
        )


@dataclass(frozen=True)
class TrainingPlan:
    """What each rank of a run needs; all need as much."""

    config: TrainConfig
    batch: IterationBatch
    axes: Axes
    units: tuple[UnitPlan, ...]
    memory: tuple[MemoryLine, ...]
    collectives: tuple[Collective, ...]
    flops: int  # of one rank in one iteration
    num_kernels: int  # likewise, of forward and backward passes, at least
    saved_bytes: int  # what one micro-batch leaves from forward to backward

    @property
    def total_bytes(self) -> int:
        """All of it together: an estimate, since the activations are one."""
        return sum(line.num_bytes for line in self.memory)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, on all ranks together."""
        return sum(buffer.layout.numel for unit in self.units for buffer in unit.buffers)

    @property
    def num_padding(self) -> int:
        """Elements that belong to no parameter, likewise."""
        return sum(buffer.layout.num_padding for unit in self.units for buffer in unit.buffers)

    def bound(self, device: Device) -> Bound:
        """Return what an iteration takes at least.

        Whatever memory is for is written and read at least once, activations by each micro-batch.
        As it is written, the host launches each kernel; captured, one graph.
        """
        num_bytes = sum(line.num_bytes for line in self.memory)
        num_bytes += self.saved_bytes * (self.batch.num_microbatches - 1)
        return bound(
            device,
            self.config.param_dtype,
            flops=self.flops,
            num_bytes=2 * num_bytes,
            wire_bytes=sum(call.wire_bytes for call in self.collectives),
            num_kernels=self.num_kernels,
            num_calls=self.num_kernels,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "preset": self.config.preset,
            "num_ranks": self.batch.num_ranks,
            "strategy": self.config.sharding.value,
            "num_units": len(self.units),
            "num_parameters": self.num_parameters,
            "num_padding": self.num_padding,
            "num_microbatches": self.batch.num_microbatches,
            "tokens_per_iteration": self.batch.num_tokens,
            "memory": [asdict(line) for line in self.memory],
            "total_bytes": self.total_bytes,
            "collectives": [
                asdict(call) | {"wire_bytes": call.wire_bytes} for call in self.collectives
            ],
            "flops": self.flops,
            "num_kernels": self.num_kernels,
        }


def plan_training(config: TrainConfig, *, num_ranks: int) -> TrainingPlan:
    """Plan a run on ``num_ranks`` ranks, those of all machines; ConfigError if it cannot start."""
    batch = config.batch(num_ranks)
    vocab_size = config.vocab_size or BYTES_VOCAB_SIZE
    model = make_model(config, vocab_size, torch.device("meta"), torch.float32)
    flops = flops_per_token(model) * batch.num_tokens // num_ranks
    axes = Axes.of(config, num_ranks)
    units = tuple(_plan_units(config, model, axes))
    calls = tuple(_collectives(config, units, axes, batch.num_microbatches))
    kept = tuple(_kept(model, units, batch))
    found = _run(config, model, units, batch.num_microbatches)
    memory = (*kept, *_made(config, units, axes, batch.num_microbatches, found))
    num_kernels = found.num_kernels * batch.num_microbatches
    return TrainingPlan(
        config, batch, axes, units, memory, calls, flops, num_kernels, found.saved_bytes
    )


def _plan_units(config: TrainConfig, model: GPT, axes: Axes) -> Iterator[UnitPlan]:
    """Yield units as the trainer makes them, in the order of their forward passes."""
    linear = linear_weights(model.modules())
    for name, module in [("", model), *model.blocks.named_children()]:
        params = {
            key: param
            for key, param in module.named_parameters()
            if name or not key.startswith("blocks.")
        }
        buffers = plan_buffers(
            {key: ParameterKind.of(param, linear) for key, param in params.items()},
            policy=config.mp_policy,
            strategy=config.sharding,
            num_ranks=math.prod(axes.cut),
        )
        full_name = f"blocks.{name}" if name else ROOT
        yield UnitPlan(full_name, module, tuple(params.values()), tuple(buffers))


def _collectives(
    config: TrainConfig, units: tuple[UnitPlan, ...], axes: Axes, num_microbatches: int
) -> Iterator[Collective]:
    """Yield an iteration's: gathers as the units run, reductions the other way round."""
    stage = config.sharding.stage
    num_gathers = 2 * num_microbatches if stage == 3 else 1
    num_scales = 0
    for unit in units:
        outside = f"{unit.name}, outer axis"
        for buffer in (each for each in unit.buffers if each.sharded):
            if axes.cuts_outside:
                num_bytes = buffer.gather_bytes // axes.inner
                yield Collective("all_gather", outside, 1, num_bytes, axes.outer)
            yield Collective("all_gather", unit.name, num_gathers, buffer.gather_bytes, axes.inner)
            num_scales += buffer.num_scales
    for size in axes.cut if num_scales else ():
        largest = "largest weights, for their scales"
        yield Collective("all_reduce", largest, 1, _SCALE_BYTES * num_scales, size)
    for unit in reversed(units):
        outside = f"{unit.name}, outer axis"
        for buffer in (each for each in unit.buffers if each.trainable):
            num_bytes = buffer.layout.total_numel * buffer.dtypes.comm.itemsize
            op, count = "all_reduce", 1
            if buffer.sharded:
                op, count = "reduce_scatter", num_microbatches if stage >= 2 else 1
            yield Collective(op, unit.name, count, num_bytes, axes.inner)
            if axes.outer > 1:
                cuts = buffer.sharded and axes.cuts_outside
                op = "reduce_scatter" if cuts else "all_reduce"
                num_bytes //= axes.inner if buffer.sharded else 1
                yield Collective(op, outside, 1, num_bytes, axes.outer)
    # Over the ranks that hold other elements, axis by axis.
    for size in axes.cut if stage else ():
        yield Collective("all_reduce", "norm of the gradients", 1, _NORM_BYTES, size)


def _kept(model: GPT, units: tuple[UnitPlan, ...], batch: IterationBatch) -> Iterator[MemoryLine]:
    """Yield what stays from one iteration to the next."""
    buffers = [buffer for unit in units for buffer in unit.buffers]
    trained = [buffer for buffer in buffers if buffer.trainable]
    main_bytes = _together(buffers, lambda buffer: buffer.dtypes.main)
    grad_bytes = _together(trained, lambda buffer: buffer.dtypes.grad)
    state_bytes = _STATE_BYTES * sum(buffer.main_numel for buffer in trained)
    module_bytes = sum(buffer.nbytes for buffer in model.buffers())
    inputs = 2 * _TOKEN_BYTES * batch.num_tokens // batch.num_ranks
    yield MemoryLine("main weights", main_bytes, True, "what the optimizer updates")
    yield MemoryLine("main grads", grad_bytes, True, "persistent gradient buffers")
    yield MemoryLine("optimizer state", state_bytes, False, "two moments; padding has none")
    yield MemoryLine("model's own buffers", module_bytes, True, "such as tables")
    yield MemoryLine("static inputs", inputs, True, "tokens and targets of an iteration")


def _together(buffers: Iterable[BufferPlan], dtype_of: Any) -> int:
    """Return the bytes of shards that lie in one storage for each dtype."""
    numels: dict[torch.dtype, list[int]] = {}
    for buffer in buffers:
        numels.setdefault(dtype_of(buffer), []).append(buffer.main_numel)
    return sum(
        neighbour_starts(found, dtype.itemsize)[-1] * dtype.itemsize
        for dtype, found in numels.items()
    )


def _run(
    config: TrainConfig, model: GPT, units: tuple[UnitPlan, ...], num_microbatches: int
) -> Activations:
    """Iterate without numbers, in the dtype of the computation."""
    for param in model.parameters():
        param.data = param.data.to(config.param_dtype)
    whole_units = [
        WholeUnit(
            unit.module,
            tuple(param for param in unit.parameters if param.requires_grad),
            sum(buffer.full_bytes for buffer in unit.buffers if buffer.sharded),
            unit.grad_bytes,
        )
        for unit in units
    ]

    return run_without_numbers(
        lambda: _forward(config, model), whole_units, config.sharding.stage, num_microbatches
    )


def _made(
    config: TrainConfig,
    units: tuple[UnitPlan, ...],
    axes: Axes,
    num_microbatches: int,
    found: Activations,
) -> Iterator[MemoryLine]:
    """Yield what an iteration takes besides."""
    stage = config.sharding.stage
    note = "gathered, or not reduced yet; the most at one time"
    yield MemoryLine("whole weights and grads", found.whole_bytes, False, note)
    if casts := _cast_bytes(units, axes, stage):
        note = "weights in the dtype of the computation that stay for an iteration"
        yield MemoryLine("cast weights", casts, True, note)
    if waiting := _unreduced_outside_bytes(units, axes, keeps=stage >= 2 and num_microbatches > 1):
        note = "reduced over the inner axis alone"
        yield MemoryLine("grads for the outer axis", waiting, False, note)
    num_bytes = found.peak_bytes - found.whole_bytes
    yield MemoryLine("activations", num_bytes, False, "when all of it is most")


def _forward(config: TrainConfig, model: GPT) -> Tensor:
    """Run a micro-batch on the meta device; return its loss."""
    shape = (config.micro_batch_size, config.seq_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    loss: Tensor = model(tokens, tokens)
    return loss


def _cast_bytes(units: Iterable[UnitPlan], axes: Axes, stage: int) -> int:
    """Return bytes of weights in the dtype of the computation that stay for an iteration.

    Copies of main weights that are not sharded, what was gathered over the outer axis alone, and
    8-bit shards.
    """
    casts = 0
    for unit in units:
        for buffer in unit.buffers:
            casts += buffer.packed_bytes
            if not buffer.sharded and buffer.dtypes.compute != buffer.dtypes.main:
                casts += buffer.full_bytes
            if buffer.sharded and axes.cuts_outside and stage == 3:
                casts += buffer.gather_bytes // axes.inner
    return casts


def _unreduced_outside_bytes(units: Iterable[UnitPlan], axes: Axes, *, keeps: bool) -> int:
    """Return gradients that are reduced over the inner axis alone, beside the main grads.

    ``keeps``: those of all units wait for the last micro-batch.
    """
    if not axes.cuts_outside:
        return 0
    waiting = [
        sum(
            buffer.layout.total_numel * buffer.dtypes.grad.itemsize // axes.inner
            for buffer in unit.buffers
            if buffer.sharded and buffer.trainable
        )
        for unit in units
    ]
    return sum(waiting) if keeps else max(waiting, default=0)
