"""What a capture asks of models whose parameters are sharded, and of optimizers.

`fully_shard` and `graphfsdp.optim.adapters` answer it. And what it asks of modules that do more
than forward and backward, and the stages of a pipeline that are on this rank.
"""

import abc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import RankGroups
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import Change, ConfigError

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


@runtime_checkable
class ShardedModule(Protocol):
    """A module that reduces gradients into persistent buffers of its own."""

    def prepare_shards(self) -> None:
        """Bring all shards to the addresses that they keep."""

    def sharded_units(self) -> Sequence[Any]:
        """Return what is gathered and reduced together: ``sharding.unit.Unit``."""

    def set_is_last_microbatch(self, is_last: bool) -> None: ...

    def finish_microbatches(self) -> None:
        """Reduce what still waits after the last backward pass of an iteration."""

    def abandon_iteration(self) -> None: ...

    def replaced_parameters(self) -> Mapping[int, nn.Parameter]:
        """Return the sharded parameters by the id of the whole one that each has replaced."""

    def is_offloaded(self) -> bool:
        """Tell whether weights and gradients are in the CPU's memory between uses."""

    def unit_orders(self) -> Any:
        """Return in which order units gather: as in the last iteration, whatever batch it had."""

    def go_by_orders(self, orders: Any) -> None: ...

    def process_groups(self) -> Sequence[dist.ProcessGroup]: ...

    def main_grads(self) -> Mapping[nn.Parameter, MainGrad]: ...


def sharded_roots(model: nn.Module) -> list[ShardedModule]:
    if isinstance(model, ShardedModule):
        return [model]
    return [root for child in nn.Module.children(model) for root in sharded_roots(child)]


def units_of(model: nn.Module) -> list[Any]:
    return [unit for root in sharded_roots(model) for unit in root.sharded_units()]


def put_back(units: Iterable[Any]) -> None:
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


class CapturableOptimizer(Protocol):
    """An optimizer whose step can be recorded once and replayed."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    use_decoupled_grad: bool

    def main_grad_dtype(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype: ...

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        """Refuse what cannot be stepped on, before anything runs.

        PrecisionError: a gradient would reach the optimizer as a casted copy. ConfigError: the
        optimizer cannot be captured; the message says what can.
        """

    def prepare_skipping(self, scope: Scope) -> None:
        """Get ready for steps that a tensor may skip, or raise ConfigError."""

    def step_by_groups(self) -> None:
        """Step on a CPU by an operator for each group, where that has the bits of the own step.

        Of most optimizers there is no such step.
        """
        return

    def skipped_steps(self) -> Tensor | None:
        """Return [] float32, the steps that were skipped so far; None if it counts none."""

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Step on the gradients that are bound now, each times ``grad_scale`` ([] float32).

        Unless ``found_inf`` ([] float32) is zero, nothing is changed; with None no step is skipped.
        Capture: no host sync; every address is fixed after the first call.
        """

    def stepping(self) -> AbstractContextManager[None]:
        """Run a body that calls ``step`` of the user's optimizer, which then steps as ours would.

        Capture: as ``step``.
        """

    def bake(self) -> None:
        """Remember the Python values that the recording is about to bake in."""

    def changes(self) -> Sequence[Change]:
        """Return what the recording has baked in and is not so any more; empty before ``bake``.

        What was loaded since is first taken over, in the tensors that the recording knows.
        Capture: nothing is recorded; called before guards are asked.
        """

    def before_replay(self) -> None:
        """Upload hyper-parameters that changed; ``changes`` has told of those that are baked."""

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor of the optimizer with a name for messages."""


class IterationPart(abc.ABC):
    """A module that has a part in an iteration beyond forward and backward."""

    @abc.abstractmethod
    def end_iteration(self) -> None:
        """Do what comes once an iteration, when all backward passes are over.

        Capture: no host sync.
        """


@runtime_checkable
class Restartable(Protocol):
    """An optimizer that knows the values with which its state begins."""

    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give entries of this optimizer's ``state`` the values of new state, in place."""
