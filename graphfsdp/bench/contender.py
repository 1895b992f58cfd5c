"""What every contender has in common: its setting, a step without host syncs, and its facts."""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from graphfsdp.bench.batches import Batch
from graphfsdp.bench.profile_names import GraphNode
from graphfsdp.bench.workloads import Case, make_model
from graphfsdp.config import ShardingStrategy
from graphfsdp.training.ranks import Ranks

BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
PEAK_LR = 1e-3
_LR_WARMUP_STEPS = 10


@dataclass(frozen=True)
class Setting:
    """What a contender is to train, and where.

    Attributes:
        seed: Decides the initial weights, which are the same for every contender and rank.
        strategy: What graphfsdp cuts where there are several ranks.
    """

    case: Case
    device: torch.device
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    strategy: ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS

    @property
    def bf16(self) -> bool:
        """Forward and backward compute in bfloat16."""
        return self.case.torch_dtype == torch.bfloat16


@dataclass(frozen=True)
class GraphFacts:
    """What a contender tells of its graph after warm-up; None where it has none."""

    capture_ms: float | None = None
    num_nodes: int | None = None
    pool_bytes: int | None = None
    notes: tuple[str, ...] = ()


class Contender(abc.ABC):
    """A model and an optimizer that train one step per call."""

    optimizer: torch.optim.Optimizer

    @abc.abstractmethod
    def train(self, batch: Batch) -> Tensor:  # [] float32 loss, the caller's to keep
        """Train one step without a host sync."""

    def __call__(self, batch: Batch, step: int) -> Tensor:  # [] float32 loss
        """Train one step at the learning rate of that step, without a host sync."""
        rate = learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return self.train(batch)

    def graph_facts(self) -> GraphFacts:
        """Return what is known of the graph."""
        return GraphFacts()

    def operator_us(self) -> tuple[float, ...]:
        """Return how long each recorded operator of an iteration takes; empty if none is.

        Weights and state are afterwards as they were.
        """
        return ()

    def replay_nodes(self) -> tuple[GraphNode, ...]:
        """Return what a replay of its graph runs; empty without a graph of ours."""
        return ()

    def close(self) -> None:
        """Free what outlives the object; the default has nothing."""
        return


@dataclass(frozen=True)
class ContenderSpec:
    """A contender that can be asked for by name.

    Attributes:
        description: What it is, for the reader of a result.
        make: Returns it, ready for its first step; may raise anything.
        needs_group: It needs a process group, also of one rank.
        compiles: Its first steps run torch.compile.
    """

    name: str
    description: str
    make: Callable[[Setting], Contender]
    needs_group: bool = False
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
    torch.manual_seed(setting.seed)
    model = make_model(setting.case.workload.model)
    if setting.bf16:
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
    return model.to(setting.device)


def to_bf16(model: nn.Module) -> None:
    """Make weights bfloat16, but for batch norms, whose statistics need float32."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            for param in module.parameters(recurse=False):
                param.data = param.data.bfloat16()
