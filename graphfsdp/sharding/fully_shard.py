"""`fully_shard`: ZeRO on a module, in FSDP2's words."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.utils import _pytree as pytree

from graphfsdp.base.dtensors import can_be_copied
from graphfsdp.base.recut import recut_hook
from graphfsdp.config import MixedPrecisionPolicy, OverlapPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.sharding.group import ShardGroup, UnitOptions
from graphfsdp.sharding.mesh import find_axes
from graphfsdp.sharding.module import FSDPModule as FSDPModule
from graphfsdp.sharding.module import attach, shards_of
from graphfsdp.sharding.unit import Unit


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    strategy: str | int | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS,
    mp_policy: MixedPrecisionPolicy | TorchPolicy | None = None,
    reshard_after_forward: bool = True,
    gradient_reduction: str = "mean",
    shard_axis: str | None = None,
    replicate_axis: str | None = None,
    expert_axis: str | None = None,
    outer_strategy: str = "no_shard",
    overlap: bool | OverlapPolicy = True,
    buffer_pool: bool = False,
) -> nn.Module:
    """Shard a module's parameters, gradients and so its optimizer state over the ranks of a mesh.

    Call it on inner modules first, on the root last; each call makes one unit, which is gathered
    and reduced as a whole. Its parameters become DTensors over this rank's rows. Make the
    optimizer afterwards, or before: ``graphfsdp.capture`` then puts the new parameters into its
    groups.

    Args:
        module: Takes over all its parameters that no unit below has.
        mesh: 1-D, or 2-D as (replicate, shard): the unit is cut over the ranks of the inner axis
            and repeated on the outer one, where gradients are reduced in the last microbatch only.
            None is all ranks of the default process group.
        strategy: "no_shard", "optim", "optim_grads" or "optim_grads_params", or 0 to 3.
        mp_policy: Dtypes of the copies of each weight and gradient; torch's own policy, too.
        reshard_after_forward: For "optim_grads_params": backward gathers whole weights again.
        gradient_reduction: "mean" over ranks, or "sum" for a per-token loss, which is already
            divided by the number of tokens on all ranks.
        shard_axis: Name of the inner axis, in a mesh with more axes than are wanted here.
        replicate_axis: Likewise of the outer axis, if there is one.
        expert_axis: Name of an axis along which each rank has other experts: plain parameters,
            of equal shapes, are taken for its rows of larger ones, so that norms count all and
            checkpoints hold all. The mean of gradients is over the ranks of this axis too, whose
            tokens an expert has seen.
        outer_strategy: "no_shard", or "optim" to cut main weights, main grads and optimizer
            state over its ranks too: model weights are gathered over it once an iteration.
        overlap: Gather and reduce while others compute, wholly or by an ``OverlapPolicy``.
        buffer_pool: Whole weights and gradients have fixed places, planned beforehand.

    Returns:
        The module, which is an ``FSDPModule`` now.

    Raises:
        ConfigError: the module, the mesh or a combination of options cannot be used.
        PrecisionError: ``.grad`` would need another dtype than its parameter.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"fully_shard takes a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ConfigError(
            f"fully_shard was called twice on the same {type(module).__name__}. Remedy: once per "
            "module, inner modules first"
        )
    _check_embeddings(module)
    policy = _policy(mp_policy)
    _check_precision(module, policy)
    parsed = ShardingStrategy.parse(strategy)
    options = UnitOptions(
        mesh=find_axes(
            _default_mesh(module) if mesh is None else mesh,
            shard_axis=shard_axis,
            replicate_axis=replicate_axis,
            expert_axis=expert_axis,
            cuts_outside=_cuts_outside(outer_strategy, parsed),
        ),
        strategy=parsed,
        policy=policy,
        reshard_after_forward=reshard_after_forward,
        reduction=_check_reduction(gradient_reduction),
        overlap=OverlapPolicy.parse(overlap),
        buffer_pool=buffer_pool,
    )
    make_unit(module, ShardGroup(module, options))
    return module


def make_unit(module: nn.Module, group: ShardGroup) -> None:
    """Let a module run on parameters that a group has taken over from it."""
    unit = Unit(module, group)
    group.bind_views()
    attach(module, unit)
    _add_hooks(module, unit)


def _add_hooks(module: nn.Module, unit: Unit) -> None:
    policy = unit.group.options.policy

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shards_of(module)
        unit.enter_forward()
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        casted: tuple[tuple[Any, ...], dict[str, Any]] = _cast((args, kwargs), dtype)
        return casted

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unit.leave_forward()
        return _cast(output, policy.output_dtype)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
    module.register_load_state_dict_pre_hook(
        recut_hook(lambda: [item.param for item in unit.group.managed])
    )
    module.register_state_dict_post_hook(_make_copyable)


def _policy(given: MixedPrecisionPolicy | TorchPolicy | None) -> MixedPrecisionPolicy:
    if not isinstance(given, TorchPolicy):
        return given or MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=given.param_dtype,
        # Without a word about it FSDP2 reduces in the dtype that gradients are computed in.
        reduce_dtype=given.reduce_dtype or given.param_dtype,
        output_dtype=given.output_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
    )


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values

    def cast(leaf: Any) -> Any:
        castable = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if castable else leaf

    return pytree.tree_map(cast, values)


def _make_copyable(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad:
            state_dict[name] = can_be_copied(value)


def _check_reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"gradient_reduction must be 'mean' or 'sum', got {reduction!r}")
    return reduction


def _cuts_outside(outer_strategy: str, strategy: ShardingStrategy) -> bool:
    outer = ShardingStrategy.parse(outer_strategy)
    if outer.stage > 1:
        raise ConfigError(
            f"outer_strategy must be 'no_shard' or 'optim', got {outer_strategy!r}: gradients and "
            "weights are cut over the inner axis alone"
        )
    if outer.stage == 1 and strategy.stage == 0:
        raise ConfigError(
            "outer_strategy='optim' with strategy='no_shard' would cut over the outer axis what "
            "is whole on the inner one. Remedy: strategy='optim' over a mesh that is cut over"
        )
    return outer.stage == 1


def _default_mesh(module: nn.Module) -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError(
            "fully_shard needs a process group: torch.distributed is not initialised. Remedy: "
            "start with torchrun and call torch.distributed.init_process_group(), or pass a mesh"
        )
    kinds = [param.device.type for param in module.parameters() if not param.is_meta]
    if not kinds:  # on meta: where the ranks can talk
        on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
        kinds = ["cuda" if on_gpu else "cpu"]
    return init_device_mesh(kinds[0], (dist.get_world_size(),))


def _check_embeddings(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.max_norm is not None:
            raise ConfigError(
                f"{type(inner).__name__} {name or '(root)'!r} has max_norm={inner.max_norm}: it "
                "renormalises rows of its weight in the forward pass, where the weight is a "
                "gathered copy, so that would be lost. Remedy: max_norm=None, and bound what was "
                "looked up: x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )


def _check_precision(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    if policy.use_decoupled_grad or policy.main_grads_dtype is None:
        return
    for name, param in module.named_parameters():
        main = policy.main_params_dtype or param.dtype
        if param.requires_grad and main != policy.main_grads_dtype:
            raise PrecisionError(
                f"main_grads_dtype is {policy.main_grads_dtype}, but the main weight of {name!r} "
                f"is {main}, so .grad could only be a casted copy of the persistent gradient. "
                "Ways out: use_decoupled_grad=True with an optimizer that reads decoupled_grad "
                "(FusedAdam), or equal main_params_dtype and main_grads_dtype"
            )
