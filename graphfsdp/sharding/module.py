"""What a module is after `fully_shard`, and how to get at its unit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphfsdp.base.sharded import MainGrad
from graphfsdp.errors import ConfigError, NotCopyableError
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.materialize.meta_tensors import mark_unset_
from graphfsdp.sharding.model_shards import ModelShards
from graphfsdp.sharding.unit import Unit

_UNIT = "_graphfsdp_unit"
_SHARDS = "_graphfsdp_shards"


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Return at once: the weights have arrived, or kernels are ordered behind them."""


class FSDPModule:
    """What a module can do after ``fully_shard``, in FSDP2's names."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse to be copied."""
        raise _refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise _refuse_copy()

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather the whole weights of this unit, and hold them.

        That is until ``reshard``, or until a backward pass of the model is over; see
        ``set_reshard_after_backward``.

        Args:
            async_op: Return a handle, as FSDP2 does. The weights are here already.
        """
        shards_of(self)
        unit_of(self).group.check_memory()
        unit_of(self).unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Put the shards of this unit back and drop its whole weights."""
        unit_of(self).reshard()

    def set_requires_gradient_sync(self, requires_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients after each backward pass, or keep them unreduced.

        Args:
            requires_sync: False while accumulating over backward passes.
            recurse: Also the units below.
        """
        for unit in units_in(self, recurse=recurse):
            unit.requires_gradient_sync = requires_sync

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

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Ignored: backward gathers what it asks for, and nothing else."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Ignored: units gather ahead in the order of the last pass; see ``OverlapPolicy``."""

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Ignored: units gather ahead in the order of the last pass; see ``OverlapPolicy``."""

    @torch.no_grad()
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

    def set_reshard_after_forward(self, reshard: bool, *, recurse: bool = True) -> None:
        """Drop whole weights between forward and backward, or keep them."""
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_forward = reshard

    def set_reshard_after_backward(self, reshard: bool, *, recurse: bool = True) -> None:
        """Drop whole weights when a backward pass is over, or keep them for the next forward.

        Kept weights are gathered again after an iteration's last backward pass, behind which the
        optimizer steps; those of ``unshard`` stay as they are until ``reshard``.

        Args:
            reshard: False between the microbatches of a pipeline, True in the last one.
            recurse: Also the units below.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_backward = reshard

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

    def __getattr__(self, name: str) -> Any:
        parent: Any = super()
        found = parent.__getattr__(name)
        if isinstance(found, DTensor) and unit_of(self).install_if_recomputing():
            found = parent.__getattr__(name)
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
        parent: Any = super()
        if not group.awaits_values:
            return parent._apply(fn, recurse)
        with _set_aside(group, fn) as device:
            if device is not None:
                found: ModelShards | None = getattr(self, _SHARDS, None)
                if found is not None:
                    found.move_to(device)
                _give_shards_memory(group, device)
            return parent._apply(fn, recurse)

    def prepare_shards(self) -> None:
        """Move the shards of all units together; the first forward does it otherwise.

        Raises:
            ConfigError: a unit is in the middle of work, or two units share a parameter.
        """
        shards_of(self)


def _refuse_copy() -> NotCopyableError:
    return NotCopyableError(
        "a sharded model cannot be pickled or copied: its shards lie in flat buffers that units "
        "and process groups share. Remedy: graphfsdp.save and graphfsdp.load, or "
        "{name: p.detach().full_tensor() for name, p in model.named_parameters()} on all ranks; "
        "for a second model, build it anew, shard it, and load that"
    )


def attach(module: nn.Module, unit: Unit) -> None:
    """Make a module an ``FSDPModule`` with a unit."""
    setattr(module, _UNIT, unit)
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def unit_of(module: object) -> Unit:
    """Return the unit of a wrapped module."""
    unit: Unit = getattr(module, _UNIT)
    return unit


def class_name(module: nn.Module) -> str:
    """Return the name of the user's class, which ``fully_shard`` has derived one of."""
    bases = type(module).__bases__
    return (bases[1] if FSDPModule in bases else type(module)).__name__


def shards_of(module: object) -> ModelShards:
    """Return the shards that a unit belongs to; make them if it is the root of what runs."""
    found: ModelShards | None = getattr(module, _SHARDS, None)
    if found is not None:
        return found
    assert isinstance(module, nn.Module)
    return join_units(module, ModelShards)


def join_units(
    root: nn.Module, join: Callable[[nn.Module, list[Unit]], ModelShards]
) -> ModelShards:
    """Make all units below a root, its own among them, run together."""
    members = units_in(root)
    shards = join(root, members)
    for member in members:
        setattr(member.module, _SHARDS, shards)
    return shards


def units_in(module: object, *, recurse: bool = True) -> list[Unit]:
    """Return the units of a module and of those below it, outermost first."""
    if not recurse:
        return [unit_of(module)]
    assert isinstance(module, nn.Module)
    return [unit_of(child) for child in module.modules() if isinstance(child, FSDPModule)]


@contextmanager
def _set_aside(
    group: ShardGroup, function: Callable[[Tensor], Tensor]
) -> Iterator[torch.device | None]:
    """Keep a unit's parameters out of ``nn.Module._apply(function)``.

    Yields the device that the function moves them to; None if it leaves them on the meta device.
    """
    device = None
    for buffer in group.buffers:
        probe = torch.empty(0, dtype=buffer.main.dtype, device="meta")
        moved = function(probe)  # torch says what to do instead, if it needs values
        if moved.dtype != probe.dtype:
            raise ConfigError(
                f"parameter {group.full_name(group.managed[0])!r} cannot be cast to "
                f"{moved.dtype}: its unit is laid out already. Remedy: cast the model before "
                "fully_shard, or give fully_shard an mp_policy"
            )
        device = None if moved.is_meta else moved.device
    places = [(owner, name, item.param) for item in group.managed for owner, name in item.owners]
    for owner, name, _ in places:
        owner._parameters[name] = None
    try:
        yield device
    finally:
        for owner, name, param in places:
            owner._parameters[name] = param


def _give_shards_memory(group: ShardGroup, device: torch.device) -> None:
    """Give a unit's shards memory where they have none; values are the user's from now on."""
    for buffer in group.buffers:
        if buffer.main.is_meta:
            main, grad = torch.zeros_like(buffer.main, device=device), buffer.grad
            buffer.move(main, None if grad is None else torch.zeros_like(grad, device=device))
    group.bind_views()
    for item in group.managed:
        if item.awaited is not None:
            mark_unset_(item.buffer.local_view(item.buffer.main, item.slot))
            item.awaited = None
