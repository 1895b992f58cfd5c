"""A sharded module while it runs: whole weights in forward and backward, reduced gradients after.

Note [Unshard as an operator of autograd]: the whole weights of a unit are outputs of one
autograd function, whose backward gets all their gradients at once and reduces them. Operators
inside the unit save weights for backward not as tensors but as places in the gathered buffer
(saved-tensor hooks), so after forward nothing holds the buffer and it is freed by itself; the
first operator of the backward pass that asks for a place gathers it again. A unit that is kept
holds on to its buffer. No storage is ever resized, no hook waits on a parameter, and a recording
sees ordinary operators only.

Note [Writes into weights]: a program may write weights anywhere (averages of weights, clipping,
renormalisation). While a unit is at rest its parameters are DTensors over the main weights, and
writing them is right: what was gathered before is gathered again. Inside the unit's forward they
are whole copies, in which a write would be lost; and between a unit's forward and its backward a
write would give gradients of weights that the forward has not seen. Both are errors. Writes
through ``.data`` count nowhere, so nobody can see those.

Note [Where a backward ends]: autograd calls its last callbacks on the thread that has finished
last. Only if some leaf of the pass lies on a GPU are the streams current there that were so where
backward() was called, and do these wait for the leaves' ones. Parameters are no leaves here, so the
token is one and lies where the weights do: else the end of a backward pass, which waits for the
reductions, would run on the legacy default stream, unordered with the optimizer step (and error 906
in a capture).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from graphfsdp.base.dtensors import Wrapping
from graphfsdp.base.streams import nvtx_range
from graphfsdp.base.torch_internals import (
    NO_BACKWARD,
    apart_from_checkpoints,
    backward_id,
    key_of,
    not_compiled,
    not_traced,
    when_backward_ends,
)
from graphfsdp.config import ShardingStrategy
from graphfsdp.errors import ConfigError, GraphFSDPError, PhaseError
from graphfsdp.sharding.buffer import ShardBuffer, are_written
from graphfsdp.sharding.gradients import Gradients, How
from graphfsdp.sharding.group import ManagedParameter, ShardGroup
from graphfsdp.sharding.schedule import Schedule


class Phase(Enum):
    """Where a unit is in a backward pass; forward passes, which may be within any, aside."""

    AT_REST = "at rest"
    # Backward runs a part of the forward again, on whole weights that are leaves of its own.
    RECOMPUTING = "recomputing"
    # These have got gradients, which are to be reduced before the backward pass is over.
    REDUCING = "reducing"


class Unit:
    """One module that `fully_shard` has wrapped, or a list of them.

    Note [Units of several modules]: weights are gathered when the first module runs, stay until the
    last one has, and are one output of autograd for all of them, so that gradients come at once.
    What has not run when the outermost forward pass is over runs on its own, and gathers again.

    ``pinned``: unsharded by hand, so that it stays whole until a backward pass is over.

    Note [Who is trained]: what ``requires_grad`` says of the sharded parameters when a forward pass
    begins.

    ``phase``: see Phase. ``_is_fresh``: between microbatches, so that no optimizer step can have
    come since weights were gathered.
    """

    def __init__(self, modules: Sequence[nn.Module], group: ShardGroup) -> None:
        self.modules = modules
        self.group = group
        self.is_root = False
        self.schedule = Schedule()
        # What the user has said about the passes to come. In the last microbatch strategies that
        # reduce once an iteration do it, and every strategy reduces over the outer axis of its
        # mesh, unless ``requires_all_reduce`` says not yet.
        self.requires_gradient_sync = True
        self.is_last_microbatch = True
        self.requires_all_reduce = True
        self.reshard_after_forward = group.options.reshard_after_forward
        self.reshard_after_backward = True
        self.in_forward = False
        self._num_within = 0  # calls of its modules inside of its own forward pass
        self.pinned = False
        self.phase = Phase.AT_REST
        self._is_fresh = False
        self._last_backward = NO_BACKWARD  # that has asked for whole weights
        self._frees = group.options.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS
        self._reduces_each_time = group.options.strategy.stage >= 2  # not once an iteration
        self._cpu_token = torch.zeros((), device="cpu", requires_grad=True)
        self._context = ExitStack()
        self._whole: list[tuple[Tensor, int]] = []  # copies in a forward pass, and their versions
        self._unsharded: list[tuple[Tensor, int]] = []  # likewise since ``unshard``
        self._waiting: set[nn.Module] = set()  # modules that have not run in this forward pass
        self._kept: list[Tensor] = []  # whole weights for them
        self._kept_with_gradients = False
        owners = {id(owner) for item in group.managed for owner, _ in item.owners}
        for inner in {id(m): m for module in modules for m in module.modules()}.values():
            # A module may read weights of one inside it that it does not call.
            if inner not in modules and owners & {id(each) for each in inner.modules()}:
                inner.register_forward_pre_hook(self._inner_call)

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def is_whole(self) -> bool:
        return self.pinned or self.in_forward

    def refuse_busy(
        self, what: str, kind: type[GraphFSDPError] = ConfigError, *, unsharded: bool = True
    ) -> None:
        """Refuse to do something to a unit that is at work, or ``unsharded`` by hand."""
        why = None
        if self.in_forward:
            why = "it is inside its forward pass"
        elif self.group.has_pending_gradients:
            why = "it has gradients that wait for their reduction"
        elif self.pinned and unsharded:
            why = "it is unsharded"
        if why is not None:
            raise kind(
                f"unit {self.name or '(root)'!r} cannot be {what}: {why}. Remedy: between two "
                "iterations, when passes are over, gradients that accumulate have been reduced by "
                "a synchronised backward pass, and what was unsharded is resharded"
            )

    def missing(self, buffers: Iterable[ShardBuffer]) -> list[ShardBuffer]:
        """Return what has to be gathered for the unit's next pass, nothing while it is at work."""
        if self.is_whole:
            return []
        self._refresh()
        return [buffer for buffer in buffers if buffer.is_missing]

    @property
    def _reshards_after_forward(self) -> bool:
        """As FSDP2 has it, where nobody has said anything: all units but the root."""
        asked = self.reshard_after_forward
        return self._frees and (not self.is_root if asked is None else bool(asked))

    def enter_forward(self, module: nn.Module) -> None:
        """Capture: an all-gather per buffer; none inside of the unit's own forward."""
        if self.in_forward:
            self._num_within += 1
            self._waiting.discard(module)
            return
        if self.phase is Phase.AT_REST and not self.pinned:
            self.group.check_in_place()
        self.group.check_memory()
        self.group.follow_requires_grad()
        self.in_forward = True
        self.schedule.enter_forward(self)
        if module in self._waiting and self._can_use_kept():
            self.group.install(self._kept)
        else:
            self._waiting.clear()
            self._refresh()
            with self._gathering(self.group.buffers):
                views = self._differentiable_views()
            self.group.install(views)
            if len(self.modules) > 1 and backward_id() == NO_BACKWARD:
                self._kept, self._waiting = views, set(self.modules)
                self._kept_with_gradients = torch.is_grad_enabled()
        self._waiting.discard(module)
        self._whole = self.group.copies()
        # Also of weights that will be kept: what backward asks for first tells where it has come.
        frees = self._frees and not self.pinned
        if torch.is_grad_enabled() and frees and not _foreign_hooks_are_active():
            places = _SavedPlaces(self.group, self._gather_again)
            self._context.enter_context(saved_tensors_hooks(places.pack, places.unpack))

    def _can_use_kept(self) -> bool:
        alike = self._kept_with_gradients == torch.is_grad_enabled()
        return alike and backward_id() == NO_BACKWARD and not self.group.is_old

    def leave_forward(self) -> None:
        """Drop whole weights that are not kept; PhaseError if the forward has written into them."""
        if not self.in_forward:
            return
        if self._num_within:
            self._num_within -= 1
            return
        written = are_written(self._whole)
        self._whole.clear()
        self._end_forward()
        if written:
            raise PhaseError(
                f"the forward pass of unit {self.group.name or '(root)'!r} writes into its weights "
                "in place. They are whole there, gathered copies, so the write would be lost. "
                "Remedy: write them where they are sharded, as DTensors: between two iterations, "
                "or, for averages of weights (a momentum encoder), in the forward of a module "
                "around the units of both; compute what a layer only uses (a clipped weight) out "
                "of place"
            )

    def _end_forward(self) -> None:
        self._context.close()
        self.in_forward = False
        self.schedule.leave_forward(self)
        if self.pinned:
            self.group.install(self._leaves())
            return
        self.group.install_shards()
        if backward_id() != NO_BACKWARD and torch.is_grad_enabled() and self.group.trainable:
            self._queue_end_of_backward()  # a recomputation, whose backward needs the weights too
            return
        if not self._waiting:
            self._drop_after_forward()

    def _drop_after_forward(self) -> None:
        self._kept = []
        if self._reshards_after_forward or (self._frees and not torch.is_grad_enabled()):
            num_few = int(self.reshard_after_forward or 0)
            to_few = torch.is_grad_enabled() and num_few > 1
            outside = not torch.is_grad_enabled() and not self._is_fresh
            self._drop_weights(outside=outside, to_few=to_few)

    def end_pass(self) -> None:
        """Wait no longer for modules that did not run in a forward pass that is over."""
        if self._waiting:
            self._waiting.clear()
            if not self.is_whole:
                self._drop_after_forward()

    def unshard(self) -> None:
        self.pinned = True
        self.schedule.packed.forget()
        self.group.reshard(outside=True)
        with torch.inference_mode(False), torch.no_grad():  # they may be used outside of it
            self.group.install(self._leaves())
        self._unsharded = self.group.copies()

    def reshard(self) -> None:
        """PhaseError: the whole weights were written since ``unshard``, which is lost."""
        written = self.pinned and are_written(self._unsharded)
        self.pinned = False
        self._unsharded = []
        self.group.reshard(outside=True)
        self.group.install_shards()
        if written:
            raise PhaseError(
                f"the weights of unit {self.group.name or '(root)'!r} were written between "
                "unshard() and reshard(). They are gathered copies there, so the write is lost. "
                "Remedy: write them where they are sharded: without unshard(), by operators on the "
                "parameters (with torch.no_grad(): param.mul_(...)), or by load_state_dict of "
                "whole tensors"
            )

    @not_traced
    def take_gradients(self, grads: Mapping[ManagedParameter, Tensor | None]) -> None:
        """Reduce whole gradients of one backward pass, or keep them.

        Capture: see Gradients.add and Gradients.reduce.
        """
        self.schedule.follow_backward()
        self.schedule.finish_reduction(self)  # of an earlier use in the same backward pass
        accumulate = self.group.has_main_grads()
        trained = {item.buffer for item in grads}
        outside = self.is_last_microbatch and self.requires_all_reduce
        self.schedule.make_room()
        added = []
        for buffer in self.group.buffers:
            gradients = buffer.gradients
            if gradients is not None and (buffer in trained or gradients.is_pending):
                found = [grads.get(item) for item in self.group.managed if item.buffer is buffer]
                gradients.add(found, accumulate=accumulate)
                added.append(gradients)
        reduces = self._reduces_each_time or self.is_last_microbatch
        if reduces and self.requires_gradient_sync:
            self._reduce(added, accumulate=accumulate, outside=outside)
        self._is_fresh = not (self.requires_gradient_sync and self.is_last_microbatch)
        self._end_backward()

    def _reduce(self, gradients: Sequence[Gradients], *, accumulate: bool, outside: bool) -> None:
        hooks = self.group.call_hooks if self.group.has_gradient_hooks else None
        how = How(accumulate, outside, self.group.options.reduction, self.group.divisor, hooks)
        repeats = any(buffer.mesh.outer is not None for buffer in self.group.buffers)
        bind = self.group.bind_main_grads if outside or not repeats else None
        with nvtx_range(f"reduce_grad {self.group.name}"):
            self.schedule.reduce(self, gradients, how, bind)

    def _end_backward(self) -> None:
        """Drop weights that a backward pass has gathered, and put the shards back."""
        if self.phase is not Phase.AT_REST and not self.is_whole:
            self.group.install_shards()
        self.phase = Phase.AT_REST
        if self._frees and self.reshard_after_backward and not self.is_whole:
            self._drop_weights(outside=not self._is_fresh)

    def leave_backward(self) -> None:
        """Go back to rest when a backward pass of the model is over, wherever it has been.

        A unit that did not run in the last microbatch has its gradients reduced now, with all
        others. One that was unsharded by hand is resharded, however its strategy holds weights.
        """
        if self.in_forward:
            return  # a backward pass inside a forward pass
        if self.pinned and self.reshard_after_backward:
            self.reshard()
        if self.requires_gradient_sync and self.is_last_microbatch:
            self.end_iteration(outside=self.requires_all_reduce)

    @torch.no_grad()
    def end_iteration(self, *, outside: bool = True) -> None:
        """Take note that all microbatches are over, and reduce what still waits of earlier ones."""
        self._is_fresh = False
        self.schedule.iteration_is_over = True
        waiting = [gradients for gradients in self.group.gradients if gradients.is_pending]
        if waiting:
            self._reduce(waiting, accumulate=self.group.has_main_grads(), outside=outside)
            self.schedule.finish_reduction(self)

    def abandon_iteration(self) -> None:
        """Go back to rest from where an exception, after which torch calls no hook, has left it."""
        self.schedule.abandon()
        self._context.close()
        self.in_forward = False
        self._num_within = 0
        self.phase = Phase.AT_REST
        self._is_fresh = False
        self._waiting.clear()
        self._kept = []
        self._whole.clear()
        for gradients in self.group.gradients:
            gradients.forget()
        if not self.pinned:
            self.reshard()

    def _inner_call(self, inner: nn.Module, args: tuple[Any, ...]) -> None:
        """Give a module inside the unit whole weights; PhaseError outside the unit's forward."""
        if not self.is_whole:  # torch.compile traces this much, and stays in one piece
            self._called_alone(inner)

    @not_traced
    def _called_alone(self, inner: nn.Module) -> None:
        owners = (owner for item in self.group.managed for owner, _ in item.owners)
        if backward_id() == NO_BACKWARD and any(inner is owner for owner in owners):
            raise PhaseError(
                f"a {type(inner).__name__} of unit {self.group.name!r} was called outside the "
                "unit's own forward, where its weights are shards. Remedy: call the unit, or "
                "wrap the inner module with fully_shard itself, or unshard() the unit first"
            )
        self.install_if_recomputing()

    def install_if_recomputing(self) -> bool:
        """Put whole weights into the module if backward asks for them while they are shards.

        Backward runs a part of its forward again then. Gradients come through the original
        forward; these leaves only make the same operators save the same tensors. A reentrant
        checkpoint has a graph of its own, which ends in them: then gradients come from there.
        """
        if self.is_whole or self.phase is not Phase.AT_REST or backward_id() == NO_BACKWARD:
            return False
        self.phase = Phase.RECOMPUTING
        self._queue_end_of_backward()
        with self._gathering(self.group.buffers):
            leaves = self._leaves()
        self.group.install(leaves)
        return True

    def _leaves(self) -> list[Tensor]:
        """Return whole weights to compute with outside of the unit's forward, gathered if need be.

        What autograd accumulates into them are gradients of the unit like any other.
        """
        leaves = []
        for item, view in self.group.full_views():
            leaf = view.detach().requires_grad_(item.trains)
            if item.trains:
                take = functools.partial(self._take_from_leaf, item)
                leaf.register_post_accumulate_grad_hook(take)
            leaves.append(leaf)
        return leaves

    @not_traced
    def _take_from_leaf(self, item: ManagedParameter, leaf: Tensor) -> None:
        """Add a gradient that a reentrant checkpoint has computed to those of the unit.

        Autograd runs what was made last first, so ``Unshard`` comes after all checkpoints of its
        pass, and takes the other gradients. Where nothing else uses the weights it never comes:
        see ``_finish_backward``. Weights that were unsharded by hand may be used anywhere, by a
        penalty behind the forward pass, too.
        """
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if self.phase is Phase.AT_REST:
            self.phase = Phase.RECOMPUTING
            self._queue_end_of_backward()
            self.schedule.follow_backward()
        self.schedule.finish_reduction(self)
        self.schedule.make_room()
        self.phase = Phase.REDUCING
        self._whole_gradient(item, by_layer=False).add_(grad)

    def _whole_gradient(self, item: ManagedParameter, *, by_layer: bool) -> Tensor:
        assert item.buffer.gradients is not None
        accumulate = self.group.has_main_grads()
        return item.buffer.gradients.view(item.slot, accumulate=accumulate, by_layer=by_layer)

    @not_traced
    def _finish_backward(self) -> None:
        if self.phase is Phase.REDUCING:
            self.take_gradients({})
            self.schedule.finish_reduction(self)
        self._end_backward()

    def _refresh(self) -> None:
        """Forget gathered weights that the optimizer may have made stale."""
        kept = self._is_fresh and not self.group.is_old
        if kept or self.pinned or backward_id() != NO_BACKWARD:
            return  # a forward inside backward is a recomputation: nothing has been stepped
        in_this_pass = any(buffer.is_prefetched for buffer in self.group.buffers)
        if not in_this_pass:  # else after any step
            self.group.reshard(outside=True)

    @contextmanager
    def _gathering(self, buffers: Sequence[ShardBuffer]) -> Iterator[None]:
        """Tell the schedule which of these buffers the body has gathered."""
        missing = [buffer for buffer in buffers if buffer.full is None]
        for buffer in missing:
            if not buffer.is_prefetched:
                self.schedule.queue_up(buffer)
        with apart_from_checkpoints():
            with nvtx_range(f"unshard {self.group.name}"):
                yield
            self.schedule.gathered(self, missing)

    def _gather_again(self, buffer: ShardBuffer) -> Tensor:
        self._queue_end_of_backward()
        is_first = self._last_backward != backward_id()
        self._last_backward = backward_id()
        if buffer.full is None:
            with self._gathering([buffer]):
                return buffer.unshard()
        if is_first and not self._reshards_after_forward:
            self.schedule.gathered(self, [buffer])  # they were kept: the next unit's turn
        return buffer.full

    def _drop_weights(self, *, outside: bool, to_few: bool = False) -> None:
        with nvtx_range(f"reshard {self.group.name}"):
            self.group.reshard(outside=outside, to_few=to_few)

    def _differentiable_views(self) -> list[Tensor]:
        """Return the whole weights as the modules compute with them; gathers what is not here."""
        if not (torch.is_grad_enabled() and self.group.trainable):
            return [view for _, view in self.group.full_views()]
        items = self.group.trainable
        whole = Unshard.apply(self._token(), self, items)  # type: ignore[no-untyped-call]
        trained = dict(zip(items, whole, strict=True))
        for item, tensor in trained.items():
            # Names that Megatron's and Transformer Engine's layers look for.
            tensor.get_main_grad = functools.partial(self._unreduced_gradient, item)
            tensor.grad_added_to_main_grad = False
        return [
            trained[item] if item in trained else view.detach()
            for item, view in self.group.full_views()
        ]

    def _token(self) -> Tensor:
        """Return a leaf that makes autograd keep ``Unshard``; see Note [Where a backward ends].

        A new one for each forward pass on a GPU: a leaf that an old loss still holds remembers the
        stream of that loss, for which a capture cannot wait.
        """
        device = self.group.trainable[0].buffer.device
        if device.type == "cpu":
            return self._cpu_token
        return torch.empty(0, device=device, requires_grad=True)

    def _unreduced_gradient(self, item: ManagedParameter) -> Tensor:
        """Return the whole gradient of one weight, for a layer that adds to it by itself.

        A whole weight has this as ``get_main_grad()``. A layer with its own backward (a fused
        weight-gradient GEMM) calls it there and adds its gradient; what it returns for the weight
        is ignored then. It may set ``grad_added_to_main_grad``, which decides nothing here.

        Capture: see Gradients.view.
        """
        self.schedule.finish_reduction(self)
        return self._whole_gradient(item, by_layer=True)

    def _queue_end_of_backward(self) -> None:
        if backward_id() != NO_BACKWARD:
            when_backward_ends(self._finish_backward)


class Unshard(Function):
    """Whole weights forward, reduced gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, unit: Unit, items: Sequence[ManagedParameter]
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.items = unit, items
        ctx.set_materialize_grads(False)  # a weight that was not used has no gradient
        views = dict(unit.group.full_views())
        return tuple(views[item] for item in items)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.unit.take_gradients(dict(zip(ctx.items, grads, strict=True)))
        return None, None, None


class _SavedWeight(NamedTuple):
    """A weight that autograd has saved for backward: where it lies in a gathered buffer."""

    buffer_index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype  # of a buffer of bytes each weight is read in its own


class _Wrapped(NamedTuple):
    """A saved wrapper (DTensor, 8-bit numbers with scales) some of whose tensors are places."""

    wrapping: Wrapping
    parts: list[Any]


class _SavedPlaces:
    """Saves tensors for backward, and places instead of those that look at gathered buffers.

    Whenever backward asks for a place, ``gather`` is called, and returns the whole buffer.
    """

    def __init__(self, group: ShardGroup, gather: Callable[[ShardBuffer], Tensor]) -> None:
        self._group = group
        self._gather = gather
        self._storages = {
            key_of(buffer.full.untyped_storage()): index
            for index, buffer in enumerate(group.buffers)
            if buffer.full is not None
        }
        self._moments = [buffer.moment() for buffer in group.buffers]

    @not_compiled
    def pack(self, tensor: Tensor) -> Any:
        wrapping, inside = Wrapping.take_apart(tensor)
        if wrapping is not None:
            parts = [self.pack(part) for part in inside]
            has_places = any(isinstance(part, _SavedWeight | _Wrapped) for part in parts)
            return _Wrapped(wrapping, parts) if has_places else tensor
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        index = self._storages.get(key_of(tensor.untyped_storage()))
        if index is None:
            return tensor
        return _SavedWeight(
            index, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        )

    @not_compiled
    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Wrapped):
            return saved.wrapping.around(self.unpack(part) for part in saved.parts)
        if not isinstance(saved, _SavedWeight):
            return saved  # type: ignore[no-any-return]
        buffer = self._group.buffers[saved.buffer_index]
        if buffer.moment()[0] != self._moments[saved.buffer_index][0]:
            raise PhaseError(
                f"weights of unit {self._group.name or '(root)'!r} were written between its "
                "forward and its backward, which gathers them again: the gradients would be wrong "
                "(without fully_shard, autograd says that they were modified by an inplace "
                "operation). Remedy: optimizer.step() and other writes after the last backward; "
                "or clone() what backward needs"
            )
        full = self._gather(buffer)
        if full.dtype != saved.dtype:
            full = full.view(saved.dtype)
        return full.as_strided(saved.shape, saved.stride, saved.offset)


def _foreign_hooks_are_active() -> bool:
    """Tell whether somebody else packs saved tensors here (activation checkpointing).

    Only the innermost hooks are asked, and a checkpoint must see every saved tensor. It saves no
    weights itself: it runs the unit's forward again.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not isinstance(getattr(top[0], "__self__", None), _SavedPlaces)
