"""What a module is after `fully_shard`, and how to get at its unit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import UnshardHandle as TorchHandle
from torch.distributed.tensor import DTensor

from graphfsdp.base.protocols import MainGrad
from graphfsdp.base.torch_internals import (
    not_traced,
    parameters_of,
    tree_map_only,
)
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError, NotCopyableError, PrecisionError
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.meta_tensors import mark_unset_
from graphfsdp.sharding.schedule import move_together, set_up
from graphfsdp.sharding.unit import Unit

_UNIT = "_graphfsdp_unit"


class UnshardHandle(TorchHandle):
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Return at once: the weights have arrived, or kernels are ordered behind them."""


class GradientReductionHandle:
    """What ``finalize_backward(async_op=True)`` returns."""

    def wait(self) -> None:
        """Return at once: gradients are reduced, or kernels are ordered behind that."""


class FSDPModule(TorchModule):
    """What a module can do after ``fully_shard``, in FSDP2's names; docs/fsdp2.md has them all.

    It is one of torch's, so that what asks for those finds it, and has nothing of theirs.
    """

    # Read by each forward pass, so that guards of a graph compare it.
    gradient_divide_factor: float | None = None
    # By these Hugging Face's libraries and torch.compile know one, as they do torch's.
    _is_fsdp_managed_module = _fsdp_use_orig_params = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make what is made of a container, a slice of a ``Sequential`` for one, a plain one."""
        plain: Any = next(kind for kind in cls.__mro__ if not issubclass(kind, TorchModule))
        return plain(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled."""
        raise NotCopyableError(
            "a sharded model cannot be pickled, as the groups of ranks that hold it cannot. "
            "Remedy: graphfsdp.save and graphfsdp.load, or torch.save(model.state_dict()), or on "
            "all ranks {name: p.detach().full_tensor() for name, p in model.named_parameters()}; "
            "for a second model copy.deepcopy"
        )

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather the whole weights of this unit, and hold them.

        That is until ``reshard``, or until a backward pass of the model is over; see
        ``set_reshard_after_backward``.

        Args:
            async_op: Return a handle, as FSDP2 does. The weights are here already.
        """
        units_with(self)
        unit_of(self).group.check_memory()
        unit_of(self).unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Put the shards of this unit back and drop its whole weights."""
        unit_of(self).reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients after each backward pass, or keep them unreduced.

        Args:
            requires_gradient_sync: False while accumulating over backward passes.
            recurse: Also the units below.
        """
        for unit in units_in(self, recurse=recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_is_last_microbatch(self, is_last: bool) -> None:
        """Tell all units below whether the coming backward pass ends the iteration.

        Strategies that do not shard gradients reduce them only then. On a mesh with an outer axis
        every strategy reduces over that axis only then, and ``.grad`` is bound only then.
        """
        for unit in units_in(self):
            unit.is_last_microbatch = is_last

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """FSDP2's word for ``set_is_last_microbatch``."""
        self.set_is_last_microbatch(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Let no backward pass end the iteration, while it is on; ``finalize_backward`` does."""
        self.set_is_last_microbatch(not enabled)

    def finalize_backward(self, *, async_op: bool = False) -> "GradientReductionHandle | None":
        """Reduce what backward passes have left unreduced, reshard, and end the iteration.

        Args:
            async_op: Return what can be waited for; it is done already.
        """
        for unit in units_in(self):
            unit.leave_backward()
        self.finish_microbatches()
        return GradientReductionHandle() if async_op else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Ignored: whole weights are views of one buffer for each unit, gathered anew."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Ignored: backward gathers what it asks for, and nothing else."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Ignored: gathers run ahead on a stream of their own."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Ignored: units gather ahead in the order of the last pass."""
        _check_sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Ignored: units gather ahead in the order of the last pass."""
        _check_sharded(modules)

    def finish_microbatches(self) -> None:
        """Reduce what still waits after the last microbatch: of units that did not run in it.

        The end of the last backward pass has done so for all units of a sharded root. A loop of
        your own needs this only where a whole root (a model whose parts alone are sharded) may
        not run in the last microbatch. ``graphfsdp.capture`` calls it.
        """
        for unit in units_in(self):
            unit.end_iteration()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce over the outer axis of the mesh after each backward pass, or not yet.

        Without an outer axis this changes nothing.

        Args:
            requires_all_reduce: False in all backward passes of an accumulation but the last.
            recurse: Also the units below.
        """
        for unit in units_in(self, recurse=recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Drop whole weights between forward and backward, or keep them."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(
                f"reshard_after_forward must be True or False, got {reshard_after_forward!r}"
            )
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Drop whole weights when a backward pass is over, or keep them for the next forward.

        Kept weights are gathered again after an iteration's last backward pass, behind which the
        optimizer steps; those of ``unshard`` stay as they are until ``reshard``.

        Args:
            reshard_after_backward: False between the microbatches of a pipeline, True in the last.
            recurse: Also the units below.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients of this unit by a number of one's own.

        Whatever ``gradient_reduction`` says. A captured graph guards the number.

        Args:
            factor: What they are divided by.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise ConfigError(f"the gradient divide factor must be positive, got {factor!r}")
        unit = unit_of(self)
        unit.group.divisor = float(factor)
        for module in unit.modules:
            module.gradient_divide_factor = float(factor)  # type: ignore[assignment]

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # FSDP2's former word

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let what comes wait for an event, behind which an optimizer has stepped elsewhere."""
        event.wait()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Ignored: a unit's gradients are reduced together, zeros for parameters without one."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Ignored: the mean over ranks is the backend's; see ``gradient_reduction``."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Ignored: at most two whole gradient buffers are alive."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Ignored: all-gathers have a communicator of their own, if anything overlaps."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Ignored: collectives work on the flat buffers themselves; nothing is staged."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Ignored: collectives work on the flat buffers themselves; nothing is staged."""

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Refuse to gather with a function of one's own."""
        raise _refuse_custom("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Refuse to reduce with a function of one's own."""
        raise _refuse_custom("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: object, *, stream: object = None) -> NoReturn:
        """Refuse a function between the reductions over the inner and the outer axis."""
        raise _refuse_custom("set_all_reduce_hook")

    def is_offloaded(self) -> bool:
        """Tell whether some unit keeps its shards in the CPU's memory."""
        return any(unit.group.options.offload is not None for unit in units_in(self))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication while the body runs."""
        before = [(unit, unit.requires_gradient_sync) for unit in units_in(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, value in before:
                unit.requires_gradient_sync = value

    def main_grads(self) -> dict[nn.Parameter, MainGrad]:
        """Return where the gradient of each trainable parameter lies, units below included."""
        found = {}
        for unit in units_in(self):
            unit.group.follow_requires_grad()
            options = unit.group.options
            for item in unit.group.trainable:
                assert item.main_grad is not None
                found[item.param] = MainGrad(
                    view=item.main_grad,
                    groups=item.grad_groups,
                    decoupled=options.policy.use_decoupled_grad,
                )
        return found

    def replaced_parameters(self) -> dict[int, nn.Parameter]:
        """Return the sharded parameters by the id of the whole one that each has replaced.

        Only whole parameters that somebody still holds: an optimizer that was made before.
        """
        found = {}
        for unit in units_in(self):
            for item in unit.group.managed:
                whole = item.whole()
                if whole is not None:
                    found[id(whole)] = item.param
        return found

    def sharded_units(self) -> list[Unit]:
        """Return the units here and below, outermost first."""
        return units_in(self)

    def unit_orders(self) -> Any:
        """Return in which order units gather in the next iteration."""
        return unit_of(self).schedule.orders()

    def go_by_orders(self, orders: Any) -> None:
        """Gather in an order that ``unit_orders`` has returned."""
        unit_of(self).schedule.go_by(orders)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that share the units, each once.

        On a mesh of several axes one for each axis.
        """
        groups = (group for unit in units_in(self) for group in unit.group.groups)
        return list(dict.fromkeys(groups))

    def abandon_iteration(self) -> None:
        """Forget an iteration that an exception has ended somewhere in the middle.

        Unreduced gradients and gathered weights are dropped, and the shards are put back.
        """
        for unit in units_in(self):
            unit.abandon_iteration()

    reset_iter_state = abandon_iteration  # FSDP2's word

    def __getattr__(self, name: str) -> Any:
        # Both times the call itself: torch.compile traces no super() that is kept.
        found = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(found, DTensor) and unit_of(self).install_if_recomputing():
            found = super().__getattr__(name)  # type: ignore[misc]
        return found

    def to_empty(self, *, device: torch.device | str | int, recurse: bool = True) -> Any:
        """Give memory without values to what is on the meta device, for values of your own.

        What is not on it keeps its values and is moved. Floating-point weights hold NaN until
        they are set: by ``graphfsdp.load``, or by functions that write to sharded parameters.
        ``graphfsdp.materialize`` gives memory and values, the same on any number of ranks.

        Args:
            device: Where to.
            recurse: Also the modules below.
        """

        def empty(tensor: Tensor) -> Tensor:
            keep = not tensor.is_meta
            return tensor.to(device) if keep else torch.empty_like(tensor, device=device)

        return self._apply(empty, recurse)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        group = unit_of(self).group
        parent: Any = super(TorchModule, self)  # not what torch does there
        dtype, device = _asked_for(group, fn)
        if dtype is None and not group.awaits_values:
            return parent._apply(fn, recurse)
        if dtype is not None:
            self._cast(group, dtype)
        with _set_aside(group):
            if device is not None:
                move_together(unit_of(self).schedule.units, device)
                give_shards_memory(group, device)
            return parent._apply(fn, recurse)

    def _cast(self, group: ShardGroup, dtype: torch.dtype) -> None:
        unit = unit_of(self)
        unit.refuse_busy(f"cast to {dtype}")
        for module in unit.modules:
            check_precision(module, group.options.policy, dtype)
        group.cast(dtype)
        move_together(unit.schedule.units)

    def prepare_shards(self) -> None:
        """Move the shards of all units together; the first forward does it otherwise.

        Raises:
            ConfigError: a unit is in the middle of work.
        """
        units_with(self)


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


def _check_sharded(modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"modules to gather ahead must be sharded, got a {type(module).__name__}"
            )


def _refuse_custom(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is not supported: a recording must know what each collective reads and writes. "
        "Remedy: a backend of torch.distributed that does it, given with the mesh"
    )


def attach(module: nn.Module, unit: Unit, methods: dict[str, Any]) -> None:
    """Make a module an ``FSDPModule`` with a unit, and with methods that know more of units.

    Modules of one class stay so: torch.compile compiles anew for another class, eight times at
    most, and runs the other blocks as they are.
    """
    setattr(module, _UNIT, unit)
    kind = type(module)
    bases = (FSDPModule, kind)
    made = (each for each in kind.__subclasses__() if each.__bases__ == bases)
    module.__class__ = next(made, None) or type(f"FSDP{kind.__name__}", bases, methods)


def unit_of(module: object) -> Unit:
    """Return the unit of a wrapped module."""
    unit: Unit = getattr(module, _UNIT)
    return unit


def class_name(module: nn.Module) -> str:
    """Return the name of the user's class, which ``fully_shard`` has derived one of."""
    bases = type(module).__bases__
    return (bases[1] if FSDPModule in bases else type(module)).__name__


def units_with(module: object) -> list[Unit]:
    """Return all units that work with a module's; it is the root if these are not set up yet."""
    unit = unit_of(module)
    if not unit.schedule.units:
        assert isinstance(module, nn.Module)
        set_up(module, units_in(module))
    return unit.schedule.units


def units_in(module: object, *, recurse: bool = True) -> list[Unit]:
    """Return the units of a module and of those below it, outermost first."""
    if not recurse:
        return [unit_of(module)]
    assert isinstance(module, nn.Module)
    found = (unit_of(child) for child in module.modules() if isinstance(child, FSDPModule))
    return list(dict.fromkeys(found))  # some have several modules


@not_traced
def begin_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a module whole weights, and return its arguments as its policy casts them.

    Those of a root on a GPU are moved there, as by FSDP2.
    """
    units_with(module)
    unit = unit_of(module)
    unit.enter_forward(module)
    divisor: Any = module.gradient_divide_factor
    assert divisor == unit.group.divisor
    policy = unit.group.options.policy
    casted: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
    gpu = unit.group.options.mesh.gpu
    if unit.is_root and gpu is not None:
        casted = _moved(casted, gpu)
    if policy.cast_forward_inputs:
        casted = _cast_leaves(casted, policy.param_dtype)
    return casted


@not_traced
def end_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Drop whole weights, and return what the module returns as its policy casts it."""
    unit = unit_of(module)
    unit.leave_forward()
    return _cast_leaves(output, unit.group.options.policy.output_dtype)


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device) if leaf.is_cpu else leaf, values)


def _cast_leaves(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return values if dtype is None else tree_map_only(Tensor, cast, values)


def _asked_for(
    group: ShardGroup, function: Callable[[Tensor], Tensor]
) -> tuple[torch.dtype | None, torch.device | None]:
    """Return what a function casts a unit's weights to, and where it moves one from meta.

    None where it leaves that as it is.
    """
    awaits = group.awaits_values
    dtype = device = None
    for buffer in group.buffers:
        main = buffer.dtypes.main
        probe = torch.empty(0, dtype=main, device="meta" if awaits else buffer.main.device)
        with torch.no_grad():
            found = function(probe)  # torch says what to do instead, if it needs values
        if found.dtype != main and awaits:
            raise ConfigError(
                f"parameter {group.full_name(group.managed[0])!r} cannot be cast to "
                f"{found.dtype}: its unit is laid out already. Remedy: cast the model before "
                "fully_shard, or give fully_shard an mp_policy"
            )
        if found.dtype != main and main.is_floating_point:
            dtype = dtype or found.dtype
        if awaits and not found.is_meta:
            device = found.device
    return dtype, device


@contextmanager
def _set_aside(group: ShardGroup) -> Iterator[None]:
    places = [(owner, name, item.param) for item in group.managed for owner, name in item.owners]
    for owner, name, _ in places:
        parameters_of(owner)[name] = None
    try:
        yield
    finally:
        for owner, name, param in places:
            parameters_of(owner)[name] = param


def give_shards_memory(group: ShardGroup, device: torch.device) -> None:
    """Give a unit's shards memory where they have none; values are the user's from now on."""
    group.take_values()
    group.give_memory(device)
    group.bind_views()
    for item in group.managed:
        if item.awaited is not None:
            mark_unset_(item.buffer.local_view(item.buffer.main, item.slot))
            item.awaited = None
