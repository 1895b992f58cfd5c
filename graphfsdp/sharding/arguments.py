"""What ``fully_shard`` takes of FSDP2's arguments, and what it refuses by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.sharding.extension import is_extended
from graphfsdp.sharding.mesh import UnitMesh, find_axes


class AlreadyShardedError(ConfigError, AssertionError):
    """``fully_shard`` was called twice on a module; torch's is an AssertionError."""


class NoValuesError(ConfigError, RuntimeError):
    """Parameters are on the meta device; torch's is a RuntimeError."""


class ReplacedError(ConfigError, RuntimeError):
    """A module holds something else than its sharded parameter."""


class UnevenError(ConfigError, NotImplementedError):
    """A dimension does not divide into as many parts as there are ranks, as torch's says it."""


class PlacementError(ConfigError, AssertionError):
    """A parameter has no such dimension; torch's is an AssertionError."""


def parse_reshard(given: bool | int | None, num_ranks: int) -> tuple[bool | None, int | None]:
    """Return whether whole weights are dropped after forward, and how many ranks keep them then.

    None is no number of its own. ConfigError: the ranks do not divide by it.
    """
    if given is None or isinstance(given, bool):
        return given, None
    if isinstance(given, int) and given > 0 and num_ranks % given == 0:
        return given > 1 or num_ranks == 1, given if 1 < given < num_ranks else None
    raise ConfigError(
        f"reshard_after_forward must be True, False, None, or a number that divides the {num_ranks}"
        f" ranks that the unit is cut over, got {given!r}. Remedy: True, which needs least memory, "
        "False, which gathers least, or the number of ranks of a machine"
    )


def parse_offload(given: OffloadPolicy | None) -> CPUOffloadPolicy | None:
    """Return the policy if there is something to do; ConfigError if it is of another kind."""
    if isinstance(given, CPUOffloadPolicy):
        return given
    if given is None or type(given) is OffloadPolicy:
        return None
    raise ConfigError(
        "offload_policy must be a torch.distributed.fsdp.OffloadPolicy or CPUOffloadPolicy, got "
        f"{type(given).__name__}"
    )


def refuse_packing(offload: CPUOffloadPolicy | None, model_parallel: Iterable[str]) -> None:
    """Refuse what does not go with a ``gather_format``."""
    if offload is not None:
        raise ConfigError(
            "gather_format quantises main weights where they are computed with, and "
            "CPUOffloadPolicy keeps them in the CPU's memory. Remedy: one of the two"
        )
    for name in model_parallel:
        raise ConfigError(
            f"gather_format does not go with tensor or expert parallelism yet: {name!r} is cut by "
            "it, so its scale would be another one on each of those ranks. Remedy: "
            "gather_format=None for the units of such layers"
        )


def find_place(
    name: str, param: nn.Parameter, place: Callable[[nn.Parameter], Any] | None, unit: UnitMesh
) -> tuple[int, UnitMesh]:
    """Return the dimension that a ``shard_placement_fn`` wants cut, and over which ranks.

    ConfigError: it asks for more than that.
    """
    wanted = None if place is None else place(param)
    over = unit
    # torch's ShardPlacementResult, which torch 2.11 does not have.
    if wanted is not None and hasattr(wanted, "mesh_info"):
        over = _mesh_of(name, wanted.mesh_info, unit)
        wanted = wanted.placement
    if wanted is None:
        return 0, over
    if type(wanted) is not Shard:
        raise ConfigError(
            f"shard_placement_fn wants {wanted!r} for {name!r}; it may say None, Shard(dim), or "
            "torch's ShardPlacementResult of these and a mesh. Remedy: None, which is Shard(0)"
        )
    if wanted.dim and not -param.dim() <= wanted.dim < param.dim():
        raise PlacementError(
            f"shard_placement_fn wants {wanted!r} for {name!r} of shape {tuple(param.shape)}, "
            f"which has {param.dim()} dimensions"
        )
    dim = wanted.dim % max(param.dim(), 1)
    if dim and (is_extended(param) or unit.cuts_outside):
        raise ConfigError(
            f"shard_placement_fn wants {wanted!r} for {name!r}, which goes neither with "
            "outer_strategy='optim' nor with fsdp_pre_all_gather. Remedy: None there"
        )
    return dim, over


def _mesh_of(name: str, info: Any, unit: UnitMesh) -> UnitMesh:
    if info.mesh == unit.mesh:
        return unit
    sharded, repeated = (getattr(info, f"{kind}_mesh_dim", None) for kind in ("shard", "replicate"))
    if unit.cuts_outside or unit.experts is not None or (repeated, sharded) not in _AXES:
        raise ConfigError(
            f"shard_placement_fn wants {name!r} on {info!r}: a parameter may have a mesh of its "
            "own that is cut over the last axis and repeated on the one before, if any; neither "
            "beside outer_strategy='optim' nor expert_axis. Remedy: such a mesh, or a fully_shard "
            "with that mesh for the module that holds the parameter"
        )
    return find_axes(info.mesh)


# Of a mesh of its own: which one is repeated on, and which one is cut over.
_AXES = ((None, 0), (0, 1))


def check_precision(
    module: nn.Module, policy: MixedPrecisionPolicy, dtype: torch.dtype | None = None
) -> None:
    """Refuse gradients of another dtype than their parameters, where they are bound to .grad.

    ``dtype``: of the parameters; None is the one that each has, or that the policy gives it.
    """
    if policy.use_decoupled_grad or policy.main_grads_dtype is None:
        return
    for name, param in module.named_parameters():
        main = dtype or policy.main_params_dtype or param.dtype
        if param.requires_grad and main != policy.main_grads_dtype:
            raise PrecisionError(
                f"main_grads_dtype is {policy.main_grads_dtype}, but the main weight of {name!r} "
                f"is {main}, so .grad could only be a casted copy of the persistent gradient. "
                "Ways out: use_decoupled_grad=True with an optimizer that reads decoupled_grad "
                "(FusedAdam), or equal main_params_dtype and main_grads_dtype"
            )
