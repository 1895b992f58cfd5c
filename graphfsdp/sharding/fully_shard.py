"""`fully_shard`: ZeRO on a module, in FSDP2's words.

Note [State dicts]: torch puts what ``load_state_dict(assign=True)`` loads in the place of the
parameters. A unit's parameters are views of its flat buffers, so their values are copied there, and
what torch assigns are the parameters themselves. A deep copy has buffers of its own, over the same
ranks.
"""

import copy
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from graphfsdp.base.dtensors import can_be_copied, local_part, recut
from graphfsdp.base.protocols import IGNORED, refuse_old_parameters
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError, NotCopyableError
from graphfsdp.sharding.group import ShardGroup, UnitOptions
from graphfsdp.sharding.mesh import find_axes
from graphfsdp.sharding.module import FSDPModule as FSDPModule
from graphfsdp.sharding.module import GradientReductionHandle as GradientReductionHandle
from graphfsdp.sharding.module import UnshardHandle as UnshardHandle
from graphfsdp.sharding.module import (
    attach,
    begin_forward,
    check_precision,
    end_forward,
    give_shards_memory,
    unit_of,
    units_in,
)
from graphfsdp.sharding.pipelines import give_state, state_of
from graphfsdp.sharding.pipelines import (
    register_fsdp_forward_method as register_fsdp_forward_method,
)
from graphfsdp.sharding.pipelines import share_comm_ctx as share_comm_ctx
from graphfsdp.sharding.schedule import Schedule
from graphfsdp.sharding.steps import StepsAlike
from graphfsdp.sharding.unit import Unit

_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])


class AlreadyShardedError(ConfigError, AssertionError):
    """``fully_shard`` was called twice on a module; torch's is an AssertionError."""


def fully_shard(
    module: _Modules,
    mesh: DeviceMesh | None = None,
    *,
    strategy: str | int | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS,
    mp_policy: MixedPrecisionPolicy | TorchPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Set[nn.Parameter] | None = None,
    dp_mesh_dims: None = None,
    gradient_reduction: str = "mean",
    shard_axis: str | None = None,
    replicate_axis: str | None = None,
    expert_axis: str | None = None,
    outer_strategy: str = "no_shard",
    overlap: bool = True,
) -> _Modules:
    """Shard a module's parameters, gradients and so its optimizer state over the ranks of a mesh.

    Call it on inner modules first, on the root last; each call makes one unit, which is gathered
    and reduced as a whole. Its parameters become DTensors over this rank's rows; what lies in the
    CPU's memory while ranks communicate by NCCL is moved to the current GPU first. Make the
    optimizer afterwards, or before: ``graphfsdp.capture`` then puts the new parameters into its
    groups.

    Args:
        module: Takes over all its parameters that no unit below has. A list of modules that run
            one after the other makes one unit: it is gathered when the first runs and dropped when
            all have. Of modules that contain each other the outermost count.
        mesh: 1-D, or 2-D as (replicate, shard): the unit is cut over the ranks of the inner axis
            and repeated on the outer one, where gradients are reduced in the last microbatch only.
            None is all ranks of the default process group.
        strategy: "no_shard", "optim", "optim_grads" or "optim_grads_params", or 0 to 3.
        mp_policy: Dtypes of the copies of each weight and gradient; torch's own policy, too.
        reshard_after_forward: For "optim_grads_params": whole weights are dropped after forward,
            and backward gathers them again. None, the default, is FSDP2's: True for all units but
            the root (the outermost one, which the first forward pass shows), where backward begins
            and would gather at once what forward has just dropped. From forward to backward a root
            that is kept takes memory for the weights of all that no unit below it holds, in the
            dtype of the computation (embedding and head of Llama-3-8B: 2,004 MiB in bfloat16); a
            model of one unit is its own root, and stays whole. True there takes none. Without
            gradients nothing is kept after forward. A number that divides the ranks of the inner
            axis: so many neighbours (those of one machine) keep the weights that forward has
            gathered, a part on each, and backward gathers from them; 1 is False.
        shard_placement_fn: May say ``Shard(dim)`` of a parameter, for which it has a buffer of its
            own, whose ranks hold as much; None is whole rows, as many as happen to fall on each.
            torch's ``ShardPlacementResult`` of either says over which mesh.
        offload_policy: torch's ``CPUOffloadPolicy`` keeps main weights, main grads and so optimizer
            state in the CPU's memory; not in a graph.
        ignored_params: Are not sharded, and nobody reduces their gradients.
        dp_mesh_dims: Not supported; see ``shard_axis`` and ``replicate_axis``.
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
        overlap: Gather a unit's weights ahead, in the order in which units ran the last time, and
            reduce its gradients while the units before it compute theirs; all-gathers then have a
            communicator of their own. Small units (2 MiB together) are gathered by one collective,
            and on a CPU reduced by one. No result changes by a bit.

    Returns:
        The module, or the list, whose modules are each an ``FSDPModule`` now.

    Raises:
        ConfigError: the module, the mesh or a combination of options cannot be used.
        PrecisionError: ``.grad`` would need another dtype than its parameter.
    """
    modules = _outermost(module)
    policy = _policy(mp_policy)
    ignored = frozenset(ignored_params or ())
    for each in modules:
        check_precision(each, policy)
        for below in units_in(each):
            below.group.take_values()
    if dp_mesh_dims is not None:
        raise ConfigError(
            "fully_shard does not take dp_mesh_dims, with parameters on all axes of a mesh. "
            "Remedy: parallelize_module over mesh['tp'], then fully_shard with mesh['dp'], or with "
            "shard_axis and replicate_axis"
        )
    if gradient_reduction not in ("mean", "sum"):
        raise ConfigError(f"gradient_reduction must be 'mean' or 'sum', got {gradient_reduction!r}")
    parsed = ShardingStrategy.parse(strategy)
    axes = find_axes(
        _default_mesh(modules) if mesh is None else mesh,
        shard_axis=shard_axis,
        replicate_axis=replicate_axis,
        expert_axis=expert_axis,
        cuts_outside=_cuts_outside(outer_strategy, parsed),
    )
    options = UnitOptions(
        mesh=axes,
        strategy=parsed,
        policy=policy,
        reshard_after_forward=_parse_reshard(reshard_after_forward, axes.inner.size()),
        reduction=gradient_reduction,
        overlap=overlap,
        offload=_parse_offload(offload_policy),
        ignored=ignored,
        place=shard_placement_fn,
    )
    for param in ignored:
        setattr(param, IGNORED, True)
    if axes.gpu is not None:
        _move(modules, axes.gpu, ignored)
    group = ShardGroup(modules, options)
    if refuse_old_parameters not in _global_optimizer_pre_hooks.values():
        register_optimizer_step_pre_hook(refuse_old_parameters)
        register_optimizer_step_pre_hook(StepsAlike())
    unit = Unit(modules, group)
    group.bind_views()
    for each in modules:
        attach(each, unit, {"__deepcopy__": _deep_copy})
        give_state(each)
        each.register_forward_pre_hook(begin_forward, prepend=True, with_kwargs=True)
        each.register_forward_hook(end_forward, always_call=True)
        each.register_load_state_dict_pre_hook(_before_loading)
        each.register_state_dict_post_hook(_after_state_dict)
    return module


def _outermost(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    modules = [given] if isinstance(given, nn.Module) else given
    are_modules = isinstance(modules, list | tuple) and all(
        isinstance(module, nn.Module) for module in modules
    )
    if not modules or not are_modules:
        raise ConfigError(f"fully_shard takes a torch.nn.Module or a list of them, got {given!r}")
    for module in modules:
        if isinstance(module, FSDPModule):
            raise AlreadyShardedError(
                f"fully_shard was called twice on the same {type(module).__name__}. Remedy: once "
                "per module, inner modules first"
            )
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_container and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{type(module).__name__} has no forward pass of its own, around which fully_shard "
                "could gather its weights. Remedy: fully_shard for each module in it, or for the "
                "module that holds it"
            )
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    found = {id(module): module for module in modules if id(module) not in inside}
    return list(found.values())


fully_shard.state = state_of  # type: ignore[attr-defined]


def _policy(given: MixedPrecisionPolicy | TorchPolicy | None) -> MixedPrecisionPolicy:
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given or MixedPrecisionPolicy()
    if not isinstance(given, TorchPolicy):
        raise ConfigError(
            "mp_policy must be a MixedPrecisionPolicy of graphfsdp's or of torch.distributed."
            f"fsdp's, got {type(given).__name__}"
        )
    return MixedPrecisionPolicy(
        param_dtype=given.param_dtype,
        # Without a word about it FSDP2 reduces in the dtype that gradients are computed in.
        reduce_dtype=given.reduce_dtype or given.param_dtype,
        output_dtype=given.output_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
    )


def _parse_reshard(given: bool | int | None, num_ranks: int) -> bool | int | None:
    """Return a number only if it is neither all ranks nor one; None is none of its own."""
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, int) and given > 0 and num_ranks % given == 0:
        return given if 1 < given < num_ranks else given == num_ranks
    raise ConfigError(
        f"reshard_after_forward must be True, False, None, or a number that divides the {num_ranks}"
        f" ranks that the unit is cut over, got {given!r}. Remedy: True, which needs least memory, "
        "False, which gathers least, or the number of ranks of a machine"
    )


def _parse_offload(given: OffloadPolicy | None) -> CPUOffloadPolicy | None:
    if isinstance(given, CPUOffloadPolicy):
        return given
    if given is None or type(given) is OffloadPolicy:
        return None
    raise ConfigError(
        "offload_policy must be a torch.distributed.fsdp.OffloadPolicy or CPUOffloadPolicy, got "
        f"{type(given).__name__}"
    )


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


def _default_mesh(modules: Sequence[nn.Module]) -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError(
            "fully_shard needs a process group: torch.distributed is not initialised. Remedy: "
            "start with torchrun and call torch.distributed.init_process_group(), or pass a mesh"
        )
    params = [param for module in modules for param in module.parameters()]
    kinds = [param.device.type for param in params if not param.is_meta] or ["cpu"]
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    kind = "cuda" if on_gpu and kinds[0] == "cpu" else kinds[0]
    return init_device_mesh(kind, (dist.get_world_size(),))


def _move(
    modules: Sequence[nn.Module], device: torch.device, ignored: Collection[nn.Parameter]
) -> None:
    """Move what lies in the CPU's memory, as FSDP2 does, but for what other units keep there."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            is_taken = isinstance(tensor, DTensor) or tensor in ignored
            if tensor.device.type == "cpu" and not is_taken:
                tensor.data = tensor.to(device)


@torch.no_grad()
def _before_loading(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Bring values into the cut of the parameters; copy here those that are to be assigned."""
    group = unit_of(module).group
    managed = {id(item.param): item for item in group.managed}
    items = {
        f"{prefix}{name}": managed[id(param)]
        for name, param in module.named_parameters(remove_duplicate=False)
        if id(param) in managed and isinstance(state.get(f"{prefix}{name}"), Tensor)
    }
    assigns = metadata.get("assign_to_params_buffers", False)
    if assigns and group.awaits_values:
        devices = {local_part(state[name]).device for name in items}
        for device in devices - {torch.device("meta")}:
            give_shards_memory(group, device)
    for name, item in items.items():
        value = state[name] = recut(state[name], item.param)
        if not assigns or value.shape != item.param.shape:
            continue  # torch says what is wrong
        if value.dtype != item.param.dtype:
            raise ConfigError(
                f"load_state_dict(assign=True) got {value.dtype} for {group.full_name(item)!r}, "
                f"which is laid out as {item.param.dtype}. Remedy: assign=False, which casts; or "
                f"model.to({value.dtype}) before"
            )
        item.param.copy_(value)
        state[name] = item.param


def _after_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Make what a state dict holds fit for ``copy.deepcopy`` and ``torch.save``."""
    for name, value in state_dict.items():
        is_made = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)  # not kept
        if name.startswith(prefix) and is_made:
            state_dict[name] = can_be_copied(value)


def _deep_copy(module: FSDPModule, memo: dict[int, Any]) -> FSDPModule:
    """Return a copy that has not run yet, with the same values and gradients.

    Hooks of gradients stay with the original, as torch has it for tensors. What ranks share is not
    copied: a target network, or an average of weights, is cut as the model that it follows.

    Raises:
        NotCopyableError: the module is at work, or holds weights that are quantised for a gather.
    """
    group = unit_of(module).group
    unit_of(module).refuse_busy("copied", NotCopyableError)
    if any(buffer.packing or buffer.extension for buffer in group.buffers):
        raise NotCopyableError(
            f"unit {group.name or '(root)'!r} has weights that are quantised for their gather, and "
            "cannot be copied. Remedy: build the model anew, fully_shard, and "
            "load_state_dict(model.state_dict())"
        )
    for tensor in [item.param for item in group.managed]:
        new = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        vars(new).update(vars(tensor))
        memo.setdefault(id(tensor), new)
    shared: list[Any] = [group.options, group.options.mesh, *group.axes.values(), *group.groups]
    for buffer in group.buffers:
        shared += [buffer.mesh, buffer.plan, buffer.layout, buffer.gather_group, buffer.few_ranks]
    memo.update((id(each), each) for each in shared)
    memo[id(unit_of(module).schedule)] = Schedule()
    for buffer in group.buffers:
        memo.setdefault(id(buffer.main), buffer.main.clone())
        memo.update((id(gathered), None) for gathered in buffer.gathered)
        if buffer.grad is not None:
            memo.setdefault(id(buffer.grad), buffer.grad.clone())
    memo.update((id(item.main_grad), None) for item in group.managed)
    made: FSDPModule = object.__new__(type(module))
    memo[id(module)] = made
    vars(made).update(copy.deepcopy(vars(module), memo))
    assert isinstance(made, nn.Module)
    give_state(made)
    copied = vars(unit_of(made)).get("group")
    if copied is None:  # it is copied with another module of its unit, which does the rest
        return made
    copied.bind_views()
    for old, item in zip(group.managed, copied.managed, strict=True):
        if getattr(old.param, group.grad_attribute, None) is not None:
            setattr(item.param, group.grad_attribute, item.main_grad)
    return made
