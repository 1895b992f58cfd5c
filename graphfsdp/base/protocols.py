"""What a capture asks of a model whose parameters are sharded; `fully_shard` answers it.

And the stages of a pipeline that are on this rank.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import RankGroups
from graphfsdp.errors import ConfigError

# On a parameter that ``fully_shard`` was told to leave alone.
IGNORED = "_graphfsdp_is_ignored"
# On a whole parameter: its name in the unit that has taken it over.
TAKEN_AS = "_graphfsdp_taken_as"


@dataclass(frozen=True)
class MainGrad:
    """Where the reduced gradient of one parameter lies for ever: this rank's rows, maybe none.

    ``groups``: the ranks with the other parts, by mesh axis; none if every rank holds the whole.
    """

    view: Tensor
    groups: RankGroups
    decoupled: bool


class ShardedUnit(Protocol):
    """What is gathered and reduced together.

    Attributes:
        name: Of the module, within the model.
        pinned: Unsharded by hand.
    """

    @property
    def name(self) -> str: ...

    pinned: bool

    def reshard(self) -> None: ...


@runtime_checkable
class ShardedModule(Protocol):
    """A module that reduces gradients into persistent buffers of its own."""

    def prepare_shards(self) -> None:
        """Bring all shards to the addresses that they keep."""

    def sharded_units(self) -> Sequence[Any]:
        """Return its units, each of which is a ``ShardedUnit``."""

    def set_is_last_microbatch(self, is_last: bool) -> None: ...

    def finish_microbatches(self) -> None:
        """Reduce what still waits after the last backward pass of an iteration."""

    def abandon_iteration(self) -> None: ...

    def replaced_parameters(self) -> Mapping[int, nn.Parameter]:
        """Return the sharded parameters by the id of the whole one that each has replaced."""

    def is_offloaded(self) -> bool:
        """Tell whether weights and gradients are in the CPU's memory between uses."""

    def process_groups(self) -> Sequence[dist.ProcessGroup]: ...

    def main_grads(self) -> Mapping[nn.Parameter, MainGrad]: ...


def sharded_roots(model: nn.Module) -> list[ShardedModule]:
    if isinstance(model, ShardedModule):
        return [model]
    return [root for child in nn.Module.children(model) for root in sharded_roots(child)]


def units_of(model: nn.Module) -> list[ShardedUnit]:
    return [unit for root in sharded_roots(model) for unit in root.sharded_units()]


def put_back(units: Iterable[ShardedUnit]) -> None:
    """Reshard what was unsharded by hand, ahead of a graph, which gathers for itself."""
    for unit in units:
        if unit.pinned:
            unit.reshard()


def pipeline_stages(model: object) -> list[Any]:
    """Return the stages on this rank if the model is a schedule of torch's pipelines, else none."""
    # Whoever has a schedule has imported it.
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None or not isinstance(model, schedules._PipelineSchedule):
        return []
    schedule: Any = model
    stage = getattr(schedule, "_stage", None)
    return list(schedule._stages) if stage is None else [stage]


def main_grads_of(model: nn.Module) -> dict[nn.Parameter, MainGrad]:
    """Return where the gradients of a model's sharded parameters lie, at their final addresses."""
    found: dict[nn.Parameter, MainGrad] = {}
    for root in sharded_roots(model):
        root.prepare_shards()  # before anything remembers an address
        found.update(root.main_grads())
    return found


def refuse_old_parameters(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Refuse a step that would train nothing; a hook of all optimizers' steps."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    old = [param for param in held if hasattr(param, TAKEN_AS)]
    if old:
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(old)} parameters of {len(held)} that "
            f"fully_shard has replaced since, {getattr(old[0], TAKEN_AS)!r} for one: they have no "
            "gradients, and it would train nothing. Remedy: make the optimizer after fully_shard; "
            "graphfsdp.capture and capture_in_place give one that was made before the new ones"
        )
