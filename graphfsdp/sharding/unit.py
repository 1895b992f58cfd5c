"""A sharded module while it runs: whole weights in forward and backward, reduced gradients after.

See Note [Unshard as an operator of autograd] in unshard_function.py.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.base.streams import Lane
from graphfsdp.config import ShardingStrategy
from graphfsdp.errors import PhaseError
from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.sharding.grad_binding import bind_main_grads, main_grads_are_bound, reduce_pending
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.saved_weights import foreign_hooks_are_active, is_in_backward, saving_places
from graphfsdp.sharding.schedule import Schedule
from graphfsdp.sharding.unit_phase import UnitPhase as UnitPhase
from graphfsdp.sharding.unshard_function import differentiable_views
from graphfsdp.sharding.weight_writes import ForwardWrites


class Unit:
    """One module that `fully_shard` has wrapped.

    Attributes:
        module: The module.
        group: Its parameters and buffers.
        schedule: What all units under one root do while others compute.
        requires_gradient_sync: Reduce gradients after backward; off while accumulating.
        is_last_microbatch: Strategies that reduce once an iteration do it now, and every strategy
            reduces over the outer axis of its mesh.
        requires_all_reduce: False: not yet over the outer axis.
        phase: What the unit is doing.
    """

    def __init__(self, module: nn.Module, group: ShardGroup) -> None:
        self.module = module
        self.group = group
        self.schedule = Schedule()
        self.requires_gradient_sync = True
        self.is_last_microbatch = True
        self.requires_all_reduce = True
        self.reshard_after_forward = group.options.reshard_after_forward
        self.phase = UnitPhase.IDLE
        self.pinned = False  # unsharded by hand: stays whole until reshard()
        self._fresh = False  # the gathered weights are those that the optimizer left
        self._token = torch.zeros((), requires_grad=True)
        self._landed: set[int] = set()  # by position in group.trainable
        self._added_by_layer: set[int] = set()  # likewise, in this backward pass
        self._context: ExitStack | None = None
        self._writes = ForwardWrites()
        self._recomputing = False
        self._from_leaves = False  # gradients have come from reentrant recomputations
        for owner in {id(o): o for item in group.managed for o, _ in item.owners}.values():
            if owner is not module:
                owner.register_forward_pre_hook(self._inner_call)

    @property
    def frees_weights(self) -> bool:
        """Whether whole weights are dropped between forward and backward."""
        sharded = self.group.options.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS
        return sharded and self.reshard_after_forward and not self.pinned

    def prefetch(self, buffer: ShardBuffer, lane: Lane) -> None:
        """Begin to gather one of the buffers, unless the unit is at work.

        Capture: see ShardBuffer.begin_unshard.
        """
        if self.phase is UnitPhase.IDLE and not self.pinned:
            self._refresh()
            with nvtx_range(f"unshard {self.group.name}"):
                buffer.begin_unshard(lane)

    def enter_forward(self) -> None:
        """Put whole weights into the module.

        Raises:
            PhaseError: the unit is inside its own forward already.

        Capture: an all-gather per buffer.
        """
        if self.phase is UnitPhase.FORWARD:
            raise PhaseError(
                f"unit {self.group.name!r} was called inside its own forward pass; its weights "
                "cannot be whole and sharded at once. Remedy: wrap the inner module instead"
            )
        self.group.check_memory()
        self.phase = UnitPhase.FORWARD
        self.schedule.enter_forward(self)
        self._refresh()
        with self._gathering():
            self._install(differentiable_views(self, self._token))
        self._writes.begin([buffer.copy for buffer in self.group.buffers])
        self._context = ExitStack()
        if torch.is_grad_enabled() and self.frees_weights and not foreign_hooks_are_active():
            hooks = saving_places(self.group.name, self.group.buffers, self._gather_again)
            self._context.enter_context(hooks)

    def leave_forward(self) -> None:
        """Put the sharded parameters back, and drop the whole weights where they are not kept.

        Raises:
            PhaseError: the forward pass has written into whole weights.
        """
        if self.phase is not UnitPhase.FORWARD:
            return
        with self._writes.ended(self.group.name):
            self._end_forward()

    def _end_forward(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None
        self.phase = UnitPhase.IDLE
        self.schedule.leave_forward(self)
        if self.pinned:
            self._install([view for _, view in self.group.full_views()])
            return
        self._install([item.param for item in self.group.managed])
        if is_in_backward() and torch.is_grad_enabled() and self.group.trainable:
            self._queue_end_of_backward()  # a recomputation, whose backward needs the weights too
            return
        keeps = self.group.options.strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS
        if not (keeps or (torch.is_grad_enabled() and not self.reshard_after_forward)):
            self._drop_weights(outside=not torch.is_grad_enabled() and not self._fresh)

    def unshard(self) -> None:
        """Hold whole weights in the module until ``reshard``."""
        self.pinned = True
        self.group.reshard(outside=True)
        with torch.no_grad():
            self._install([view for _, view in self.group.full_views()])

    def reshard(self) -> None:
        """Put the sharded parameters back and drop the whole weights."""
        self.pinned = False
        self.group.reshard(outside=True)
        self._install([item.param for item in self.group.managed])

    def take_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Reduce the gradients of one backward pass, or keep them until the sync.

        Args:
            grads: One per trainable parameter, whole; None where there is none.

        Capture: see ShardBuffer.add_gradients and ShardBuffer.reduce.
        """
        self.schedule.finish_reduction(self)  # of an earlier use in the same backward pass
        accumulate = main_grads_are_bound(self.group)
        per_buffer: dict[int, list[Tensor | None]] = {}
        for position, (item, grad) in enumerate(zip(self.group.trainable, grads, strict=True)):
            if position in self._added_by_layer:
                grad = None  # a dummy for autograd's sake
            per_buffer.setdefault(id(item.buffer), []).append(grad)
            if grad is not None:
                self._landed.add(position)
        self._added_by_layer.clear()
        self._from_leaves = False
        early = self.group.options.strategy.stage >= 2
        sync = self.requires_gradient_sync and (early or self.is_last_microbatch)
        outside = self.is_last_microbatch and self.requires_all_reduce
        self.schedule.make_room()
        steps = []
        for buffer in self.group.buffers:
            if buffer.trainable:
                buffer.add_gradients(per_buffer[id(buffer)], accumulate=accumulate)
                lane, how = self.schedule.reduce_lane(self, buffer), self.group.options.reduction
                steps.append(
                    buffer.reduce(lane, accumulate=accumulate, reduction=how, outside=outside)
                )
        if sync:
            complete = outside or self.group.options.mesh.outer is None
            with nvtx_range(f"reduce_grad {self.group.name}"):
                self.schedule.reduce(self, steps, self._bind_gradients if complete else None)
        # Until then no optimizer step can have come between, so gathered weights stay good.
        self._fresh = not (self.requires_gradient_sync and self.is_last_microbatch)
        if not self._fresh:
            self.schedule.end_iteration()
        self.end_backward()

    def end_backward(self) -> None:
        """Drop weights that a backward pass has gathered, and put the shards back."""
        if self._recomputing:
            self._recomputing = False
            self._install([item.param for item in self.group.managed])
        stage_three = self.group.options.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS
        if stage_three and not self.pinned and self.phase is UnitPhase.IDLE:
            self._drop_weights(outside=not self._fresh)

    def end_iteration(self) -> None:
        """Take note that all microbatches are over, if the unit did not run in the last one."""
        self._fresh = False
        if self.group.has_pending_gradients:
            reduce_pending(self.group)
            self._bind_gradients()

    def abandon_iteration(self) -> None:
        """Go back to rest from where an exception, after which torch calls no hook, has left it."""
        self.schedule.abandon()
        if self._context is not None:
            self._context.close()
            self._context = None
        self.phase = UnitPhase.IDLE
        self._fresh = False
        self._recomputing = self._from_leaves = False
        self._writes.forget()
        self._landed.clear()
        self._added_by_layer.clear()
        for buffer in self.group.buffers:
            buffer.abandon_gradients()
        if not self.pinned:
            self.group.reshard(outside=True)
            self._install([item.param for item in self.group.managed])

    def _inner_call(self, inner: nn.Module, args: tuple[Any, ...]) -> None:
        """See to it that a module inside the unit finds whole weights.

        Raises:
            PhaseError: it was called from outside the unit's forward.
        """
        if self.phase is UnitPhase.FORWARD or self.pinned:
            return
        if not is_in_backward():
            raise PhaseError(
                f"a {type(inner).__name__} of unit {self.group.name!r} was called outside the "
                "unit's own forward, where its weights are shards. Remedy: call the unit, or "
                "wrap the inner module with fully_shard itself, or unshard() the unit first"
            )
        self.install_if_recomputing()

    def install_if_recomputing(self) -> bool:
        """Put whole weights into the module if backward asks for them while they are shards."""
        resting = self.phase is UnitPhase.IDLE and not (self.pinned or self._recomputing)
        if resting and is_in_backward():
            self._install_for_recomputation()
            return True
        return False

    def _install_for_recomputation(self) -> None:
        """Put whole weights into the module while backward runs a part of its forward again.

        Their gradients come through the original forward; these leaves only make the same
        operators save the same tensors. A reentrant checkpoint has a graph of its own, which
        ends in them: then gradients come from there.
        """
        self._recomputing = True
        self._queue_end_of_backward()
        with self._gathering():
            views = list(self.group.full_views())
        leaves = [view.detach().requires_grad_(item.buffer.trainable) for item, view in views]
        for position, leaf in enumerate(leaf for leaf in leaves if leaf.requires_grad):
            take = functools.partial(self._take_from_leaf, position)
            leaf.register_post_accumulate_grad_hook(take)
        self._install(leaves)

    def _take_from_leaf(self, position: int, leaf: Tensor) -> None:
        """Add a gradient that a reentrant checkpoint has computed to those of the unit.

        Autograd runs what was made last first, so ``Unshard`` comes after all checkpoints of its
        pass, and takes the other gradients. Where nothing else uses the weights it never comes:
        see ``_finish_backward``.
        """
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        self.schedule.finish_reduction(self)
        self.schedule.make_room()
        self._from_leaves = True
        self._landed.add(position)
        item = self.group.trainable[position]
        accumulate = main_grads_are_bound(self.group)
        item.buffer.unreduced_gradient(item.slot, accumulate=accumulate).add_(grad)

    def _finish_backward(self) -> None:
        if self._from_leaves:
            self.take_gradients([None] * len(self.group.trainable))
            self.schedule.finish_reduction(self)
        self.end_backward()

    def _refresh(self) -> None:
        """Forget gathered weights that the optimizer may have made stale."""
        kept = self._fresh and not self.group.is_old
        if kept or self.pinned or is_in_backward():
            return  # a forward inside backward is a recomputation: nothing has been stepped
        if not self.group.is_prefetched:  # in this pass, so after any step
            self.group.reshard(outside=True)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Tell the schedule which buffers the body has gathered."""
        missing = [buffer for buffer in self.group.buffers if buffer.full is None]
        with nvtx_range(f"unshard {self.group.name}"):
            yield
        self.schedule.gathered(self, missing)

    def _gather_again(self, buffer: ShardBuffer) -> Tensor:
        """Return a whole buffer in a backward pass."""
        self._queue_end_of_backward()
        full = buffer.full
        if full is None:
            with nvtx_range(f"unshard {self.group.name}"):
                full = buffer.unshard()
            self.schedule.gathered(self, [buffer])
        return full

    def _drop_weights(self, *, outside: bool) -> None:
        with nvtx_range(f"reshard {self.group.name}"):
            self.group.reshard(outside=outside)

    def unreduced_gradient(self, position: int) -> Tensor:
        """Return the whole gradient of one weight, for a layer that adds to it by itself.

        A whole weight has this as ``get_main_grad()``. A layer with its own backward (a fused
        weight-gradient GEMM) calls it there and adds its gradient; what it returns for the weight
        is ignored then. It may set ``grad_added_to_main_grad``, which decides nothing here.

        Args:
            position: Number of the weight among the trainable ones.

        Capture: see ShardBuffer.unreduced_gradient.
        """
        item = self.group.trainable[position]
        self.schedule.finish_reduction(self)
        self._landed.add(position)
        self._added_by_layer.add(position)
        accumulate = main_grads_are_bound(self.group)
        return item.buffer.unreduced_gradient(item.slot, accumulate=accumulate)

    def _install(self, tensors: Sequence[Tensor]) -> None:
        for item, tensor in zip(self.group.managed, tensors, strict=True):
            for owner, name in item.owners:
                # Past nn.Module.__setattr__, which takes nothing but Parameters here.
                seen = tensor if tensor is item.param else item.as_seen(tensor)
                owner._parameters[name] = seen  # type: ignore[assignment]

    def _queue_end_of_backward(self) -> None:
        if is_in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _bind_gradients(self) -> None:
        bind_main_grads(self.group, self._landed)
        self._landed.clear()


__all__ = ["Unit", "UnitPhase"]
