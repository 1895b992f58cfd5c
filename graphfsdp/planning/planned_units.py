"""The flat buffers of every unit of a model, laid out as ``fully_shard`` lays them out."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.plan import BufferPlan, ParameterKind, plan_buffers


@dataclass(frozen=True)
class UnitPlan:
    """One module that ``fully_shard`` wraps.

    Attributes:
        name: Full name of the module, "" for the root.
        buffers: Its flat buffers.
    """

    name: str
    buffers: tuple[BufferPlan, ...]

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole, gathered weights of the sharded buffers."""
        return sum(buffer.full_bytes for buffer in self.buffers if buffer.sharded)

    @property
    def full_grad_bytes(self) -> int:
        """Bytes of the whole gradients that wait to be reduced."""
        return sum(buffer.full_grad_bytes for buffer in self.buffers)


def plan_units(
    model: nn.Module,
    names: Sequence[str],
    *,
    policy: MixedPrecisionPolicy,
    strategy: ShardingStrategy,
    num_parts: int,
) -> tuple[UnitPlan, ...]:
    """Return the units of a model in the order of its modules, the root first.

    Args:
        model: Its parameters are looked at, not touched.
        names: Full names of the modules that are wrapped one by one, in the order of wrapping;
            the root comes last by itself.
        policy: Dtypes of the copies.
        strategy: What is sharded.
        num_parts: Into how many parts main weights are cut.

    Raises:
        ConfigError: there is no such module.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ConfigError(f"the model has no module {unknown[0]!r}; units are full names")
    taken: set[int] = set()
    plans = []
    for name in (*(name for name in names if name), ""):
        params = {
            inner: param
            for inner, param in modules[name].named_parameters()
            if id(param) not in taken
        }
        taken |= {id(param) for param in params.values()}
        kinds = {
            inner: ParameterKind(tuple(param.shape), param.dtype, param.requires_grad)
            for inner, param in params.items()
        }
        buffers = plan_buffers(kinds, policy=policy, strategy=strategy, num_ranks=num_parts)
        plans.append(UnitPlan(name, tuple(buffers)))
    order = {name: index for index, name in enumerate(modules)}
    return tuple(sorted(plans, key=lambda plan: order[plan.name]))
