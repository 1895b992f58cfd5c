"""Which flat buffers a unit gets, and how many bytes: from shapes alone, without any tensor."""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from graphfsdp.base.dtensors import EXTENSION, local_part
from graphfsdp.base.torch_internals import parameters_of
from graphfsdp.config import GatherFormat, MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.eight_bit.formats import BLOCK
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.layout import BufferLayout, Slot, plan_unit


class UnevenError(ConfigError, NotImplementedError):
    """A dimension does not divide into as many parts as there are ranks, as torch's says it."""


@dataclass(frozen=True)
class ParameterKind:
    """A parameter's full shape, and what decides which parameters may share a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    device: str = "cpu"
    is_linear: bool = False  # the weight of nn.Linear and of nothing else
    extended: bool = False  # its class says what is gathered of it, see extension.py
    dim: int = 0  # that is cut, evenly if not the first one

    @classmethod
    def of(
        cls, param: nn.Parameter, linear: Container[int], device: str = "cpu", dim: int = 0
    ) -> "ParameterKind":
        """``linear``: what ``linear_weights`` has found."""
        return cls(
            tuple(local_part(param).shape),
            param.dtype,
            param.requires_grad,
            device,
            is_linear=param.is_floating_point() and id(param) in linear,
            extended=hasattr(param, EXTENSION),
            dim=dim,
        )


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
    gather_format: GatherFormat | None = None

    @property
    def sharded(self) -> bool:
        return self.strategy is not ShardingStrategy.NO_SHARD

    @property
    def main_numel(self) -> int:
        return self.layout.shard_numel if self.sharded else self.layout.total_numel

    def num_scales_of(self, slot: Slot) -> int:
        if self.gather_format is GatherFormat.FLOAT8:
            return 1
        return slot.num_rows if self.gather_format is GatherFormat.FLOAT8_ROWWISE else 0


def linear_weights(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of weights that ``nn.Linear`` alone holds, in the modules given."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for module in modules:
        for name, param in parameters_of(module).items():
            found[isinstance(module, nn.Linear) and name == "weight"].add(id(param))
    return found[True] - found[False]


def plan_buffers(
    params: Mapping[str, ParameterKind],  # by full name within the unit, each once
    *,
    policy: MixedPrecisionPolicy,
    strategy: ShardingStrategy,
    num_ranks: int,
) -> list[BufferPlan]:
    kinds: dict[tuple[torch.dtype, str, bool, bool, GatherFormat | None], list[str]] = {}
    plans = []
    for name, param in params.items():
        if param.extended or (param.dim and strategy is not ShardingStrategy.NO_SHARD):
            dtypes = BufferDtypes.of(param.dtype, policy)
            parts = 1 if strategy is ShardingStrategy.NO_SHARD else num_ranks
            layout = _equal_rows(name, param, parts)
            plans.append(BufferPlan(layout, (name,), dtypes, strategy, param.trainable))
            continue
        # A scalar has no rows to share out: every rank holds it.
        packs = _gather_format(name, param, policy)
        kind = (param.dtype, param.device, param.trainable, len(param.shape) > 0, packs)
        kinds.setdefault(kind, []).append(name)
    for (dtype, _, trainable, has_rows, packs), names in kinds.items():
        used = strategy if has_rows else ShardingStrategy.NO_SHARD
        dtypes = BufferDtypes.of(dtype, policy)
        shapes = [params[name].shape for name in names]
        parts = 1 if used is ShardingStrategy.NO_SHARD else num_ranks
        itemsizes = [dtypes.main.itemsize, dtypes.compute.itemsize, dtypes.grad.itemsize]
        itemsizes += [] if packs is None else [1]
        for layout in plan_unit(shapes, num_ranks=parts, itemsize=min(itemsizes)):
            members = tuple(names[slot.index] for slot in layout.slots)
            plans.append(BufferPlan(layout, members, dtypes, used, trainable, packs))
    return plans


def _equal_rows(name: str, param: ParameterKind, num_ranks: int) -> BufferLayout:
    """UnevenError: ranks would have other numbers of rows."""
    slot = Slot(0, 0, param.shape, param.dim)
    if not param.shape or slot.num_rows % num_ranks:
        why = "fsdp_pre_all_gather" if param.extended else f"shard_placement_fn=Shard({param.dim})"
        raise UnevenError(
            f"{name!r} of shape {param.shape} has {why}, for which each of the {num_ranks} ranks "
            "must have as much. Remedy: a size that the ranks divide, or a plain parameter that is "
            "cut by its first dimension"
        )
    return BufferLayout(num_ranks, 1, slot.numel // num_ranks, (slot,))


def _gather_format(
    name: str, param: ParameterKind, policy: MixedPrecisionPolicy
) -> GatherFormat | None:
    """ConfigError: the weight does not divide into the blocks of its format."""
    if policy.gather_format is None or not param.is_linear or not math.prod(param.shape):
        return None
    chosen = GatherFormat.parse(policy.gather_format)
    if chosen is GatherFormat.MXFP8 and param.shape[-1] % BLOCK:
        raise ConfigError(
            f"gather_format='mxfp8' has a scale for each {BLOCK} values of a row, and {name!r} of "
            f"shape {param.shape} has rows of {param.shape[-1]}. Remedy: in_features that "
            f"{BLOCK} divides, gather_format='float8', or a unit of its own for that layer"
        )
    return chosen
