"""``graphfsdp plan``: what each rank of a training run will need, memory and bytes over links.

What lies on a rank and what goes over each link is arithmetic on the layout of ``fully_shard``.
Activations, and the whole weights and gradients beside them, are an estimate. Nothing here has
memory or needs ranks. The least time of an iteration is a bound, nothing that was measured: a
kernel takes at least as long as its arithmetic at the peak of the data sheet, and as its bytes
through the GPU's memory; it is shorter only where caches spare it some of the bytes.

Note [Run without numbers]: for the estimate an iteration of the unsharded model runs on the meta
device, where nothing has memory. What its operators make is counted as long as it lives. Whole
weights and gradients of its units are counted beside that by rules: a unit is gathered before an
operator reads its weights, and the next one with it, the root's weights stay from forward to
backward, and while one unit's gradients are reduced the next one's are made.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from graphfsdp.base.memory import neighbour_starts
from graphfsdp.base.op_tensors import OpCall, OperatorMode, flat_tensors, is_empty, storage_key
from graphfsdp.base.torch_internals import key_of
from graphfsdp.cli import Parser, add_flags, print_line, require
from graphfsdp.sharding.layout import BufferPlan, plan_buffers
from graphfsdp.training.config import StrategyName, TrainConfig, parse_train_arguments
from graphfsdp.training.gpt import GPT, make_model
from graphfsdp.training.ranks import GPUS, Gpu

DeviceName = Literal["h100", "h200", "b200"]
DEVICES: Mapping[DeviceName, Gpu] = MappingProxyType(
    {name: gpu for name in get_args(DeviceName) for gpu in GPUS if gpu.name == name.upper()}
)

# One short kernel after another of 2.9 us each took 3.8 us where the host launched them one by one
# and had nothing else to do, and 3.4 us in a graph.
# Source: Gray, Getting Started with CUDA Graphs, NVIDIA Technical Blog 2019, on a V100.
CALL_S, NODE_S = 3.8e-6, 0.5e-6

_TOKEN_BYTES, _NORM_BYTES = 8, 8
_STATE_BYTES = 8  # FusedAdam's two moments of an element, in float32


class Unit(NamedTuple):
    """A module that is sharded by itself."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[BufferPlan, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights while they are gathered."""
        return sum(whole_bytes(each, each.dtypes.compute) for each in self.buffers if each.sharded)

    @property
    def grad_bytes(self) -> int:
        """Bytes of whole gradients on their way to the main grads."""
        return sum(whole_bytes(each, each.dtypes.comm) for each in self.buffers if each.trainable)


def whole_bytes(buffer: BufferPlan, dtype: torch.dtype) -> int:
    """Return the bytes of all ranks' parts together, padding included."""
    return buffer.layout.total_numel * dtype.itemsize


class Activations(NamedTuple):
    saved_bytes: int  # what the forward pass leaves for the backward pass
    peak_bytes: int  # the most that lives at one time, whole weights and gradients included
    whole_bytes: int  # the most of whole weights and gradients alone
    num_kernels: int  # of one micro-batch, at least: operators that make or write something


def run_without_numbers(
    run: Callable[[], Tensor],
    units: Sequence[Unit],  # in the order of their forward passes, the root first
    stage: int,
    num_microbatches: int = 1,
) -> Activations:
    """``run`` is the forward pass of one micro-batch; ``stage`` is ZeRO's. Hooks stay on units."""
    lives = Lives()
    iteration = _Iteration(units, stage, lives)
    saved_bytes = 0
    with _FusedKernels(), iteration:
        for left in reversed(range(min(num_microbatches, 2))):  # a third one is as the second
            iteration.reduces = left == 0 or stage >= 2
            iteration.num_kernels = 0
            iteration.begins_pass(ahead=1)
            loss = run()
            saved_bytes = lives.now()
            iteration.begins_pass(ahead=-1)
            loss.backward()
    peaks = lives.peak_bytes, iteration.peak_whole_bytes
    return Activations(saved_bytes, *peaks, iteration.num_kernels)


class Lives:
    """Adds up the bytes of storages that are still alive."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total = 0
        self.peak_bytes = 0

    def now(self) -> int:
        gone = [key for key, (ref, _) in self._live.items() if ref.expired()]
        for key in gone:
            self._total -= self._live.pop(key)[1]
        return self._total

    def add(self, storage: torch.UntypedStorage) -> None:
        if key_of(storage) not in self._live:
            self._live[key_of(storage)] = (StorageWeakRef(storage), storage.nbytes())
            self._total += storage.nbytes()
        if self._total > self.peak_bytes:  # else it is no new maximum, whatever has been freed
            self.peak_bytes = max(self.peak_bytes, self.now())


class _Iteration(OperatorMode):
    """Sees operators, and so which units are gathered, what is made, and which gradients wait."""

    def __init__(self, units: Sequence[Unit], stage: int, lives: Lives) -> None:
        super().__init__()
        self._units, self._stage, self._lives = units, stage, lives
        self._unit_of = {
            storage_key(param): index
            for index, unit in enumerate(units)
            for param in unit.parameters
        }
        self._awaited = [0] * len(units)  # parameters without a gradient yet, of each unit
        self._reducing = -1
        self.reduces = True
        self.num_kernels = 0
        self._ahead = 1  # to the unit that runs next; -1 in the backward pass
        self._begun: set[int] = set()  # units in this pass
        self._whole: dict[tuple[int, str], Tensor] = {}  # weights and gradients, without numbers
        self.peak_whole_bytes = 0
        for index, unit in enumerate(units):
            unit.module.register_forward_hook(lambda *_, index=index: self._ran(index))
            for param in unit.parameters:
                param.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._has_gradient(index)
                )

    def begins_pass(self, ahead: int) -> None:
        self._ahead = ahead
        self._begun.clear()

    def _hold(self, index: int, what: str, num_bytes: int) -> None:
        if (index, what) not in self._whole:
            whole = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            self._whole[index, what] = whole
            self._lives.add(whole.untyped_storage())
            now = sum(each.nbytes for each in self._whole.values())
            self.peak_whole_bytes = max(self.peak_whole_bytes, now)

    def on_op(self, call: OpCall) -> Any:
        given = set(map(storage_key, flat_tensors((*call.args, *call.kwargs.values()))))
        read = {self._unit_of[key] for key in given if key in self._unit_of}
        for index in read - self._begun if self._stage else ():
            self._begun.add(index)
            for each in (index, index + self._ahead):  # the next one's gather is overlapped
                if 0 <= each < len(self._units):
                    self._hold(each, "weights", self._units[each].weight_bytes)
        result = call.run()
        made = [each for each in flat_tensors([result]) if storage_key(each) not in given]
        for tensor in made:
            self._lives.add(tensor.untyped_storage())
        self.num_kernels += bool(made or call.written) and not is_empty(call.op)
        return result

    def _ran(self, index: int) -> None:
        if self._stage == 3 and index != 0:  # the root is kept for its backward
            self._whole.pop((index, "weights"), None)
        self._awaited[index] = len(self._units[index].parameters)

    def _has_gradient(self, index: int) -> None:
        self._awaited[index] -= 1
        if self._awaited[index]:
            return
        unit = self._units[index]
        if self._stage:  # all of a unit's are copied to its whole gradients together
            self._hold(index, "grads", unit.grad_bytes)
        for param in unit.parameters:
            param.grad = None
        if self._stage == 3:
            self._whole.pop((index, "weights"), None)
        if self.reduces:
            self._whole.pop((self._reducing, "grads"), None)  # that has been reduced meanwhile
            self._reducing = index
        if self.reduces and index == 0:  # the root is the last
            self._whole.pop((index, "grads"), None)


class _FusedKernels(TorchFunctionMode):
    """Where torch has one kernel on a GPU, and on the meta device what keeps far more.

    Attention keeps all scores there, and RMSNorm float32 copies of its input: LayerNorm is one
    kernel, and keeps as much as a fused RMSNorm but for one number of each row.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        if func is nn.functional.rms_norm:
            return nn.functional.layer_norm(args[0], args[1], (kwargs or {})["weight"])
        return func(*args, **(kwargs or {}))


class Bound(NamedTuple):
    """Seconds. ``host`` launches what the GPU computes, sends and receives, all at one time."""

    arithmetic: float
    memory: float
    links: float
    host: float

    @property
    def captured(self) -> float:
        """The least of an iteration that the host launches as one graph."""
        return max(self.arithmetic, self.memory, self.links, CALL_S)


class Collective(NamedTuple):
    """What ranks do together; ``buffer_bytes`` are of the whole buffer, padding included."""

    op: str
    num_calls: int  # in one iteration
    buffer_bytes: int
    num_ranks: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in one iteration, as a ring does it."""
        rounds = 2 if self.op == "all_reduce" else 1
        return self.num_calls * rounds * self.buffer_bytes * (self.num_ranks - 1) // self.num_ranks


class MemoryLine(NamedTuple):
    kind: str
    num_bytes: int
    exact: bool  # the layout decides it to the byte; else it is an estimate


class TrainingPlan:
    """What each rank of a run needs; all need as much. ConfigError: it cannot start.

    Units are cut over ``inner`` ranks, and that is repeated ``outer`` times; with ``cuts_outside``
    the optimizer state is cut over the outer axis too.
    """

    def __init__(self, config: TrainConfig, num_ranks: int) -> None:
        self.config, self.batch, self.num_ranks = config, config.batch(num_ranks), num_ranks
        self.outer = config.num_distributed_optimizer_instances
        self.inner = num_ranks // self.outer
        self.cuts_outside = config.outer_dp_sharding_strategy == "optim" and self.outer > 1
        model = make_model(config.gpt(), torch.device("meta"), torch.float32)
        self.units = _units(config, model, num_ranks if self.cuts_outside else self.inner)
        self.buffers = [buffer for unit in self.units for buffer in unit.buffers]
        # Elements on all ranks together; those of padding belong to no parameter.
        self.num_parameters = sum(buffer.layout.numel for buffer in self.buffers)
        self.num_padding = sum(buffer.layout.num_padding for buffer in self.buffers)
        # In the dtype of the computation.
        for param in model.parameters():
            param.data = param.data.to(config.param_dtype)
        size = (config.micro_batch_size, config.seq_length)
        tokens = torch.empty(size, dtype=torch.int64, device="meta")
        stage, num_microbatches = config.sharding.stage, self.batch.num_microbatches
        self.activations = run_without_numbers(
            lambda: model(tokens, tokens), self.units, stage, num_microbatches
        )
        self.own_bytes = sum(each.nbytes for each in model.buffers())  # of the model's own buffers
        # Of one rank in one iteration; kernels of forward and backward passes, at least.
        self.flops = model.flops_per_token() * self.batch.num_tokens // num_ranks
        self.num_kernels = self.activations.num_kernels * num_microbatches
        # An estimate, since the activations are one.
        self.total_bytes = sum(line.num_bytes for line in self.memory())

    def bound(self, device: Gpu) -> Bound:
        """Return what an iteration takes at least.

        Whatever memory is for is written and read at least once, activations by each micro-batch.
        As it is written, the host launches each kernel; captured, one graph.
        """
        saved_bytes = self.activations.saved_bytes * (self.batch.num_microbatches - 1)
        gaps = self.num_kernels * NODE_S
        return Bound(
            self.flops / device.flops_per_s(self.config.param_dtype) + gaps,
            2 * (self.total_bytes + saved_bytes) / device.memory_rate + gaps,
            sum(call.wire_bytes for call in self.collectives()) / device.link_rate,
            self.num_kernels * CALL_S,
        )

    def memory(self) -> Iterator[MemoryLine]:
        """Yield what stays from one iteration to the next, then what an iteration takes besides."""
        stage, batch, found = self.config.sharding.stage, self.batch, self.activations
        trained = [buffer for buffer in self.buffers if buffer.trainable]
        main_bytes = _together(self.buffers, lambda buffer: buffer.dtypes.main)
        grad_bytes = _together(trained, lambda buffer: buffer.dtypes.grad)
        # Padding has none.
        state_bytes = _STATE_BYTES * sum(buffer.main_numel for buffer in trained)
        inputs = 2 * _TOKEN_BYTES * batch.num_tokens // self.num_ranks
        yield MemoryLine("main weights", main_bytes, True)
        yield MemoryLine("main grads", grad_bytes, True)
        yield MemoryLine("optimizer state", state_bytes, False)
        yield MemoryLine("model's own buffers", self.own_bytes, True)
        yield MemoryLine("static inputs", inputs, True)
        yield MemoryLine("whole weights and grads", found.whole_bytes, False)
        # Copies of main weights that are not cut, and what was gathered over the outer axis alone.
        whole = [(each, whole_bytes(each, each.dtypes.compute)) for each in self.buffers]
        uncut = [
            n for each, n in whole if not each.sharded and each.dtypes.compute != each.dtypes.main
        ]
        half = [n // self.inner for each, n in whole if each.sharded]
        half_casts = sum(half) if self.cuts_outside and stage == 3 else 0
        yield MemoryLine("cast weights", sum(uncut) + half_casts, True)
        if self.cuts_outside:
            waiting = [
                sum(
                    whole_bytes(buffer, buffer.dtypes.grad) // self.inner
                    for buffer in unit.buffers
                    if buffer.sharded and buffer.trainable
                )
                for unit in self.units
            ]
            # Reduced over the inner axis alone; those of all units wait for the last micro-batch.
            all_wait = stage >= 2 and batch.num_microbatches > 1
            yield MemoryLine("grads for the outer axis", (sum if all_wait else max)(waiting), False)
        yield MemoryLine("activations", found.peak_bytes - found.whole_bytes, False)

    def collectives(self) -> Iterator[Collective]:
        """Yield an iteration's: gathers as the units run, reductions the other way round.

        Each unit's is counted on its own; an iteration joins those of small ones (base/joined).
        """
        stage, num_microbatches = self.config.sharding.stage, self.batch.num_microbatches
        for index, unit in enumerate(self.units):
            passes = 2 if index else 1  # that gather: the root is kept for its backward
            num_gathers = passes * num_microbatches if stage == 3 else 1
            for buffer in (each for each in unit.buffers if each.sharded):
                num_bytes = whole_bytes(buffer, buffer.dtypes.compute)
                if self.cuts_outside:
                    yield Collective("all_gather", 1, num_bytes // self.inner, self.outer)
                yield Collective("all_gather", num_gathers, num_bytes, self.inner)
        for unit in reversed(self.units):
            for buffer in (each for each in unit.buffers if each.trainable):
                num_bytes = whole_bytes(buffer, buffer.dtypes.comm)
                op, num_calls = "all_reduce", 1
                if buffer.sharded:
                    op, num_calls = "reduce_scatter", num_microbatches if stage >= 2 else 1
                yield Collective(op, num_calls, num_bytes, self.inner)
                if self.outer > 1:
                    cuts = buffer.sharded and self.cuts_outside
                    op = "reduce_scatter" if cuts else "all_reduce"
                    num_bytes //= self.inner if buffer.sharded else 1
                    yield Collective(op, 1, num_bytes, self.outer)
        # Over the ranks that hold other elements, axis by axis.
        if stage:
            for size in (self.inner, self.outer)[: 2 if self.cuts_outside else 1]:
                yield Collective("all_reduce", 1, _NORM_BYTES, size)  # norm of the gradients


def _units(config: TrainConfig, model: GPT, num_parts: int) -> list[Unit]:
    """Return units as the trainer makes them, in the order of their forward passes."""
    units = []
    for module in (model, *model.blocks.children()):
        params = {
            key: param
            for key, param in module.named_parameters()
            if not key.startswith("blocks.")  # those of the root's are units
        }
        buffers = plan_buffers(
            params, policy=config.mp_policy, strategy=config.sharding, num_ranks=num_parts
        )
        units.append(Unit(module, tuple(params.values()), tuple(buffers)))
    return units


def _together(buffers: Iterable[BufferPlan], dtype_of: Any) -> int:
    """Return the bytes of shards that lie in one storage for each dtype."""
    numels: dict[torch.dtype, list[int]] = {}
    for buffer in buffers:
        numels.setdefault(dtype_of(buffer), []).append(buffer.main_numel)
    return sum(
        neighbour_starts(found, dtype.itemsize)[-1] * dtype.itemsize
        for dtype, found in numels.items()
    )


@dataclass(frozen=True)
class _Options:
    """Each field is a flag (``cli.add_flags``)."""

    world_size: Annotated[int, "number of ranks"] = 8
    strategy: Annotated[StrategyName | None, "short for --data-parallel-sharding-strategy"] = None
    device: Annotated[DeviceName | None, "the least time of an iteration on such GPUs"] = None

    def __post_init__(self) -> None:
        require("world_size", self.world_size, self.world_size >= 1, "at least 1")


def run_plan(arguments: Sequence[str], console: Console) -> None:
    parser = Parser(
        prog="graphfsdp plan",
        description="Tell what each rank of a training run will need, on any machine: memory by "
        "kind,\npadding, and what goes over each link in an iteration.",
        epilog="Every flag of 'graphfsdp train' describes the run: --preset, --bf16, "
        "--micro-batch-size,\n--global-batch-size, --seq-length, ...",
    )
    add_flags(parser, _Options, {})
    parsed, others = parser.parse_known_args(arguments)
    options = _Options(**vars(parsed))
    if options.strategy is not None:
        others += ["--data-parallel-sharding-strategy", options.strategy]
    plan = TrainingPlan(parse_train_arguments(others), options.world_size)
    for line in _lines(plan, options.device):
        print_line(console, line)


def _lines(plan: TrainingPlan, device: DeviceName | None) -> Iterator[str]:
    config = plan.config
    over = f" over {plan.inner} ranks, {plan.outer} times" if plan.outer > 1 else ""
    over += ", optimizer state cut over all" if plan.cuts_outside else ""
    yield f"{config.preset} on {plan.num_ranks} ranks, {config.sharding.value}{over}"
    yield "memory of each rank (~ marks estimates; all else the layout decides, to the byte):"
    for kind, num_bytes, exact in plan.memory():
        if num_bytes:
            yield _row("" if exact else "~", num_bytes, kind)
    yield _row("~", plan.total_bytes, "together")
    yield "a rank sends in one iteration:"
    collectives = list(plan.collectives())
    for op in dict.fromkeys(call.op for call in collectives):
        calls = [call for call in collectives if call.op == op]
        count = sum(call.num_calls for call in calls)
        yield _row("", sum(call.wire_bytes for call in calls), f"{op}, {count:,} times")
    padding = 100 * plan.num_padding / max(plan.num_parameters, 1)
    yield (
        f"{plan.num_parameters:,} parameters in {len(plan.units)} units, "
        f"{plan.num_padding:,} elements of padding on all ranks ({padding:.3f} %)"
    )
    yield (
        f"{plan.batch.num_tokens:,} tokens in an iteration, {plan.batch.num_microbatches} "
        f"micro-batches on each rank, {plan.flops / 1e12:,.3g} TFLOP of arithmetic"
    )
    if device is not None:
        bound = plan.bound(DEVICES[device])
        written, captured, *shares = (
            f"{1e3 * seconds:,.3g} ms" for seconds in (max(bound), bound.captured, *bound)
        )
        yield (
            f"an iteration takes at least {written} as it is written, {captured} captured (bound, "
            "not measured): arithmetic {}, memory {}, links {}, the host's {:,} launches or more {}"
        ).format(*shares[:3], plan.num_kernels, shares[3])


def _row(mark: str, num_bytes: int, what: str) -> str:
    return f"  {mark:1}{num_bytes / 2**20:>13,.2f} MiB  {what}"
