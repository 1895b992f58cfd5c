"""A tower of blocks as a pipeline: whole, in stages, sharded, and with a rank that fails."""

import dataclasses
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphfsdp
from faults_at_operators import Fault, FaultMode
from graphfsdp.optim import FusedAdam
from ranks import RankPool, rank_device, world_group
from sharding_helpers import ADAM_EPS, Block

WIDTH = 6
NUM_BLOCKS = 4
BATCH = 8
SECONDS = 30  # in which all is over, the first warm-ups included


class Tower(nn.Module):
    """Blocks, of which a stage holds some; its parameters have the names of the whole model."""

    seen: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH), persistent=False)  # a statistic
        self.blocks = nn.ModuleDict({str(i): Block(WIDTH, dropout) for i in range(NUM_BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(x.detach().mean(dim=0))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def whole(dropout: float = 0.0) -> Tower:
    torch.manual_seed(5)
    return Tower(dropout).to(rank_device())


def part(index: int, num_stages: int, dropout: float = 0.0) -> Tower:
    model = whole(dropout)
    first, last = (NUM_BLOCKS * i // num_stages for i in (index, index + 1))
    for block in range(NUM_BLOCKS):
        if not first <= block < last:
            del model.blocks[str(block)]
    if index != num_stages - 1:
        model.head = None
    return model


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclasses.dataclass
class Kind:
    schedule: Any
    num_virtual: int = 1
    style: str = "loop"
    num_microbatches: int = 4


KINDS = {
    "gpipe": Kind(pipelining.ScheduleGPipe),
    "1f1b": Kind(pipelining.Schedule1F1B),
    "interleaved": Kind(pipelining.ScheduleInterleaved1F1B, 2),
    "looped bfs": Kind(pipelining.ScheduleLoopedBFS, 2),
    "zero bubble": Kind(pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": Kind(pipelining.ScheduleZBVZeroBubble, 2, "v"),
    "dual": Kind(pipelining.ScheduleDualPipeV, 2, "v"),
}


def schedule_of(
    kind: Kind,
    *,
    group: dist.ProcessGroup | None = None,
    dropout: float = 0.0,
    shard: Callable[[nn.Module], Any] = lambda module: None,
    **options: Any,
) -> Any:
    group = group or world_group()
    size, rank = group.size(), group.rank()
    num_stages = size * kind.num_virtual
    mine = [rank + size * i for i in range(kind.num_virtual)]
    if kind.style == "v":
        mine = [rank, num_stages - 1 - rank]
    stages = []
    for index in mine:
        module = part(index, num_stages, dropout)
        shard(module)
        stage = pipelining.PipelineStage(module, index, num_stages, rank_device(), group=group)
        stages.append(stage)
    options = {"loss_fn": loss_of, "n_microbatches": kind.num_microbatches, **options}
    return kind.schedule(
        stages[0] if hasattr(kind.schedule, "_initialize_stage") else stages, **options
    )


def modules_of(schedule: Any) -> list[nn.Module]:
    stages = [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages
    return [stage.submod for stage in stages]


def parameters_of(schedule: Any) -> dict[str, nn.Parameter]:
    return {name: p for module in modules_of(schedule) for name, p in module.named_parameters()}


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x.to(rank_device()), torch.randn(BATCH, 3, generator=generator).to(rank_device())


def adam(schedule: Any, **options: Any) -> FusedAdam:
    return FusedAdam(parameters_of(schedule).values(), lr=0.02, eps=ADAM_EPS, **options)


def data_parallel(
    mesh: DeviceMesh, strategy: str, of_rest: str | None = None
) -> Callable[[nn.Module], Any]:
    def shard(module: nn.Module) -> None:
        assert isinstance(module, Tower)
        for block in module.blocks.values():
            graphfsdp.fully_shard(block, mesh, strategy=strategy)
        graphfsdp.fully_shard(module, mesh, strategy=of_rest or strategy)

    return shard


def tensor_parallel(mesh: DeviceMesh) -> Callable[[nn.Module], Any]:
    def shard(module: nn.Module) -> None:
        assert isinstance(module, Tower)
        for block in module.blocks.values():
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return shard


def fails_on_the_last_rank(
    name: str, index: int, num_ops: int, launches: Callable[[], AbstractContextManager[Any]]
) -> tuple[str, str]:
    schedule = schedule_of(KINDS[name], dropout=0.2)
    optim = adam(schedule)
    step = graphfsdp.capture(schedule, optim, max_grad_norm=1.0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for earlier in range(index):
        x, target = batch(earlier)
        step(x, target=target)
    x, target = batch(index)
    fails = FaultMode(num_ops, Fault.ERROR, after=False) if is_last else launches()
    with pytest.raises(Exception) as caught, fails:  # noqa: PT011, PT012 (judged by the caller)
        # Launched on a GPU, a replay has come back before any other rank has failed.
        while True:
            step(x, target=target)
    # One that still waited when Python ends would take the process with it.
    assert not [each for each in threading.enumerate() if each.name == "graphfsdp messages"]
    return f"{caught.type.__name__}: {caught.value}", step.phase.value


def check_failing_rank(
    pool: RankPool,
    name: str,
    index: int,
    num_ops: int,
    launches: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Let the last rank fail at an operator of a step; the others hear of it within seconds.

    ``launches``: around the step of the others.
    """
    try:
        run = (fails_on_the_last_rank, name, index, num_ops, launches)
        *others, (failed, _) = pool.run(*run, limit_s=SECONDS)
    finally:
        pool.close(force=True)
    assert "InjectedError" in failed
    num_ranks = pool.num_ranks
    place = f"rank {num_ranks - 1} of {num_ranks} failed in iteration {index + 1}"
    for heard, phase in others:
        assert heard.startswith(f"RankFailedError: {place}"), heard
        assert phase == "broken"
