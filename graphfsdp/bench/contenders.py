"""Who trains: graphfsdp in each scope, PyTorch's loops, FSDP2.

A contender is a model and an optimizer that train one step per call without a host sync.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import graphfsdp
from graphfsdp.bench.results import REFERENCE
from graphfsdp.bench.workloads import SEED, Case
from graphfsdp.config import MixedPrecisionPolicy, Scope, ShardingStrategy
from graphfsdp.data import Batch
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.ranks import Ranks, backend_for

PEAK_LR = 1e-3
ADAM: Mapping[str, Any] = MappingProxyType(
    {"lr": PEAK_LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
)
MAX_GRAD_NORM = 1.0
TIMEOUT_MINUTES = 30
WARMUP_STEPS = 3  # of graphfsdp.capture
_LR_WARMUP_STEPS = 10


@dataclass(frozen=True)
class Setting:
    """A case, and how it is measured.

    ``limit_s`` is of the whole case: when half of it is over, no contender starts, and when most
    is, no round.
    """

    case: Case
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    seconds: float = 15.0  # of the timed region
    limit_s: float = math.inf

    @property
    def bf16(self) -> bool:
        return self.case.dtype == "bf16"


@dataclass(frozen=True)
class Window:
    """Milliseconds per step; the CPU's of all threads."""

    step_ms: tuple[float, ...]
    cpu_ms: float

    @property
    def mean_ms(self) -> float:
        return sum(self.step_ms) / len(self.step_ms)


@dataclass
class Contender:
    """A model and an optimizer that train one step per call, and what has been seen of them."""

    train: Callable[[Batch], Tensor]  # returns the [] float32 loss, the caller's to keep
    optimizer: torch.optim.Optimizer
    captured: graphfsdp.CapturedStep | None = None
    init_ms: float = 0.0  # built and warmed up, capture and compilation included
    windows: list[Window] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # [K] float32 on the device, by windows

    def __call__(self, batch: Batch, step: int) -> Tensor:  # [] float32 loss
        """Train one step at the learning rate of that step, without a host sync."""
        rate = learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return self.train(batch)

    def all_losses(self) -> Tensor:  # [K] float32
        return torch.cat(self.losses).cpu()

    def close(self) -> None:
        """Free what outlives the object."""
        if self.captured is not None:
            self.captured.close()


@dataclass(frozen=True)
class ContenderSpec:
    """A contender by name; ``make`` may raise anything."""

    name: str
    description: str
    make: Callable[[Setting], Contender]
    compiles: bool = False


def learning_rate(step: int) -> float:
    """Return the rate of a step, another one each time: linear warm-up, then 1 / sqrt(step)."""
    steps = step + 1
    scale = min(steps / _LR_WARMUP_STEPS, math.sqrt(_LR_WARMUP_STEPS / steps))
    return PEAK_LR * scale


def initial_model(setting: Setting) -> nn.Module:
    """Return the model on its device with float32 weights, the same ones for every contender.

    In a bf16 case they are rounded to values that bfloat16 has, so that contenders that keep
    float32 weights and contenders that keep bfloat16 ones begin with the same numbers.
    """
    torch.manual_seed(SEED)
    model = setting.case.workload.make()
    if setting.bf16:
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
    return model.to(setting.device)


def own_contender(setting: Setting, scope: Scope, *, compiled: bool = False) -> Contender:
    """Return ``graphfsdp.capture`` with FusedAdam; on several ranks the model is sharded."""
    model = initial_model(setting)
    policy: MixedPrecisionPolicy | None = None
    if setting.ranks.launched:
        if setting.bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (*model.get_submodule("blocks").children(), model):  # what FSDP2 cuts
            graphfsdp.fully_shard(
                module,
                strategy=ShardingStrategy.OPTIM_GRADS_PARAMS,
                mp_policy=policy or MixedPrecisionPolicy(),
            )
    elif setting.bf16:
        for param in model.parameters():  # buffers such as RoPE's tables stay in float32
            param.data = param.data.bfloat16()
    optimizer = FusedAdam(
        model.parameters(),
        master_weights=setting.bf16 and not setting.ranks.launched,
        **ADAM,
    )
    step = graphfsdp.capture(
        model,
        optimizer,
        scope=scope,
        warmup_steps=WARMUP_STEPS,
        max_grad_norm=MAX_GRAD_NORM,
        mp_policy=policy,
        compile=compiled and (True if setting.device.type == "cuda" else "auto"),
    )
    return Contender(lambda batch: step(*batch), optimizer, step)


def tutorial_loop(model: nn.Module, *, autocasts: bool) -> Contender:
    """Return the loop that PyTorch's tutorials teach: backward, clip, step, zero_grad."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **ADAM)
    precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if autocasts:
        precision = torch.autocast(params[0].device.type, dtype=torch.bfloat16)

    def train(batch: Batch) -> Tensor:  # [] float32 loss
        with precision:
            loss: Tensor = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(train, optimizer)


def torch_loop(setting: Setting, *, compile_mode: str | None = None) -> Contender:
    """Return a loop around a model, which is compiled if a mode is given."""
    model = initial_model(setting)
    if setting.ranks.launched:
        devices = [setting.device] if setting.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices)
    compiled: Any = model if compile_mode is None else torch.compile(model, mode=compile_mode)
    return tutorial_loop(compiled, autocasts=setting.bf16)


def reduce_overhead(setting: Setting) -> Contender:
    """Return a loop around ``mode="reduce-overhead"``, with CUDA graphs of torch's own."""
    from torch._dynamo.utils import counters

    loop = torch_loop(setting, compile_mode="reduce-overhead")

    def train(batch: Batch) -> Tensor:  # [] float32 loss, a copy: the next step overwrites it
        torch.compiler.cudagraph_mark_step_begin()
        loss = loop.train(batch).clone()
        if skips := counters["inductor"]["cudagraph_skips"]:
            raise ConfigError(
                f"torch used no CUDA graph in {skips} place(s), which ran as under torch.compile"
            )
        return loss

    return Contender(train, loop.optimizer)


def fsdp2(setting: Setting, *, compile_blocks: bool = False) -> Contender:
    """Return PyTorch's ``fully_shard`` on each block, compiled before, and on the root.

    Where no launcher has made a group, it makes one of one rank, which ``measure_case`` ends.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = backend_for(setting.device)
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    model = initial_model(setting)
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if setting.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks: Any = model.get_submodule("blocks")
    for index, block in enumerate(blocks):
        if compile_blocks:
            blocks[index] = torch.compile(block)
        fully_shard(blocks[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return tutorial_loop(model, autocasts=False)


CONTENDERS = (
    ContenderSpec(
        REFERENCE,
        "graphfsdp with scope none: the captured code, run eagerly, with FusedAdam; the reference",
        functools.partial(own_contender, scope=Scope.NONE),
    ),
    ContenderSpec(
        "pytorch",
        "a plain PyTorch loop: AdamW(fused=True), clip_grad_norm_; bf16 by autocast; "
        "DistributedDataParallel on several ranks",
        torch_loop,
    ),
    ContenderSpec(
        "compile",
        "the plain loop around torch.compile(model)",
        functools.partial(torch_loop, compile_mode="default"),
        compiles=True,
    ),
    ContenderSpec(
        "reduce_overhead",
        'the plain loop around torch.compile(model, mode="reduce-overhead")',
        reduce_overhead,
        compiles=True,
    ),
    ContenderSpec(
        "fsdp2",
        "PyTorch's FSDP2 (fully_shard on each block and the root), AdamW(fused=True)",
        fsdp2,
    ),
    ContenderSpec(
        "fsdp2_compile",
        "the same with each block compiled by torch.compile",
        functools.partial(fsdp2, compile_blocks=True),
        compiles=True,
    ),
    ContenderSpec(
        "forward_backward",
        "graphfsdp with forward and backward in the graph, FusedAdam eager",
        functools.partial(own_contender, scope=Scope.FORWARD_BACKWARD),
    ),
    ContenderSpec(
        "full_iteration",
        "graphfsdp with the whole iteration in one graph",
        functools.partial(own_contender, scope=Scope.FULL_ITERATION),
    ),
    ContenderSpec(
        "compiled_recording",
        "graphfsdp with the whole iteration in one graph, compiled: capture(compile=...)",
        functools.partial(own_contender, scope=Scope.FULL_ITERATION, compiled=True),
        compiles=True,
    ),
)


def find_contenders(names: tuple[str, ...] | None) -> tuple[ContenderSpec, ...]:
    """The reference always comes first; None is all."""
    return tuple(
        spec for spec in CONTENDERS if names is None or spec.name == REFERENCE or spec.name in names
    )
