"""Which flat buffers a unit gets, and how many bytes: from shapes alone, without any tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.sharding.layout import BufferLayout, plan_unit


@dataclass(frozen=True)
class ParameterKind:
    """A parameter's full shape, and what decides which parameters may share a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    device: str = "cpu"


@dataclass(frozen=True)
class BufferDtypes:
    """Of gathered weights, main weights, main grads, and what gradients are reduced in."""

    compute: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    comm: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> "BufferDtypes":
        if not dtype.is_floating_point:
            return cls(dtype, dtype, dtype, dtype)
        main = policy.main_params_dtype or dtype
        grad = policy.main_grads_dtype or main
        compute = policy.param_dtype or dtype
        return cls(compute, main, grad, policy.comm_dtype or grad)


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer of a unit before it has memory; ``names`` are in the order of the slots.

    ``strategy`` is NO_SHARD for scalars, which have no rows to share out.
    """

    layout: BufferLayout
    names: tuple[str, ...]
    dtypes: BufferDtypes
    strategy: ShardingStrategy
    trainable: bool

    @property
    def sharded(self) -> bool:
        return self.strategy is not ShardingStrategy.NO_SHARD

    @property
    def main_numel(self) -> int:
        return self.layout.shard_numel if self.sharded else self.layout.total_numel

    @property
    def full_bytes(self) -> int:
        return self.layout.total_numel * self.dtypes.compute.itemsize

    @property
    def full_grad_bytes(self) -> int:
        return self.layout.total_numel * self.dtypes.comm.itemsize if self.trainable else 0


def plan_buffers(
    params: Mapping[str, ParameterKind],  # by full name within the unit, each once
    *,
    policy: MixedPrecisionPolicy,
    strategy: ShardingStrategy,
    num_ranks: int,
) -> list[BufferPlan]:
    kinds: dict[tuple[torch.dtype, str, bool, bool], list[str]] = {}
    for name, param in params.items():
        # A scalar has no rows to share out: every rank holds it.
        kind = (param.dtype, param.device, param.trainable, len(param.shape) > 0)
        kinds.setdefault(kind, []).append(name)
    plans = []
    for (dtype, _, trainable, has_rows), names in kinds.items():
        used = strategy if has_rows else ShardingStrategy.NO_SHARD
        dtypes = BufferDtypes.of(dtype, policy)
        layouts = plan_unit(
            [params[name].shape for name in names],
            num_ranks=1 if used is ShardingStrategy.NO_SHARD else num_ranks,
            itemsize=min(dtypes.main.itemsize, dtypes.compute.itemsize, dtypes.grad.itemsize),
        )
        for layout in layouts:
            members = tuple(names[slot.index] for slot in layout.slots)
            plans.append(BufferPlan(layout, members, dtypes, used, trainable))
    return plans
