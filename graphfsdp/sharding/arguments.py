"""What ``fully_shard`` takes of FSDP2's arguments, and what it refuses by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError, PrecisionError


class AlreadyShardedError(ConfigError, AssertionError):
    """``fully_shard`` was called twice on a module; torch's is an AssertionError."""


class NoValuesError(ConfigError, RuntimeError):
    """Parameters are on the meta device; torch's is a RuntimeError."""


class UnevenError(ConfigError, NotImplementedError):
    """A dimension does not divide into as many parts as there are ranks, as torch's says it."""


class PlacementError(ConfigError, AssertionError):
    """A parameter has no such dimension; torch's is an AssertionError."""


def parse_reshard(given: bool | int | None, num_ranks: int) -> tuple[bool | None, int]:
    """Return whether whole weights are dropped after forward, and how many ranks keep them then.

    That is all ranks of the unit, or as many as were asked for. ConfigError: these do not divide.
    """
    if given is None or isinstance(given, bool):
        return given, num_ranks
    if isinstance(given, int) and given > 0 and num_ranks % given == 0:
        return given > 1 or num_ranks == 1, given if given > 1 else num_ranks
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


def cut_dim(name: str, param: nn.Parameter, place: Callable[[nn.Parameter], Any] | None) -> int:
    """Return the dimension that a ``shard_placement_fn`` wants cut; ConfigError if it asks more."""
    wanted = None if place is None else place(param)
    if wanted is None:
        return 0
    if type(wanted) is not Shard:
        raise ConfigError(
            f"shard_placement_fn wants {wanted!r} for {name!r}; it may say None or Shard(dim), all "
            "over the same ranks. Remedy: for parameters on other ranks a fully_shard of their "
            "module with another mesh"
        )
    if wanted.dim and not -param.dim() <= wanted.dim < param.dim():
        raise PlacementError(
            f"shard_placement_fn wants {wanted!r} for {name!r} of shape {tuple(param.shape)}, "
            f"which has {param.dim()} dimensions"
        )
    return wanted.dim % max(param.dim(), 1)


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
