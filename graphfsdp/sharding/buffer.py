"""One flat buffer of a unit, cut into one shard per rank: weights, gathered weights, gradients.

Shapes: B = elements of the whole buffer; S = elements of one rank's main weights and main grads
([B] where nothing is sharded); I = B / ranks of the inner axis = elements that a rank gives to an
all-gather, and has after a reduction over that axis. I = S, unless the optimizer's part is cut over
an outer axis as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.collectives import Transfer, all_gather_, all_reduce_, reduce_scatter_
from graphfsdp.base.flat_buffer import copy_all
from graphfsdp.base.host_memory import zeros_flat
from graphfsdp.base.streams import Lane
from graphfsdp.base.torch_internals import local_tensor_of
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.sharding.extension import Extension
from graphfsdp.sharding.layout import BufferLayout, LocalRows, Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.packing import Packing
from graphfsdp.sharding.plan import BufferDtypes, BufferPlan

Moment = tuple[int, bool]


class Memory(NamedTuple):
    """Where something lies; pinned is page-locked, for fast copies to a GPU."""

    device: torch.device
    pinned: bool


class _Prefetched(NamedTuple):
    whole: Tensor  # [B] where the weights arrive, or their bytes
    transfer: Transfer
    moment: Moment  # what must not have changed when the weights are used


class ShardBuffer:
    """One BufferPlan's storage on this rank: [S] main weights, [B] gathered ones while unsharded.

    ``params``: what the optimizer and the user see of the main weights. ``gather_group``: of
    all-gathers alone where possible, so that they do not queue behind reductions. ``device`` is
    where the unit computes; main weights and main grads are in the CPU's memory if ``offloaded``.
    """

    def __init__(
        self,
        plan: BufferPlan,
        mesh: UnitMesh,
        device: torch.device,
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        self.device = device
        self.plan = plan
        self.layout = plan.layout
        self.dtypes = plan.dtypes
        self.sharded = plan.sharded
        self.mesh = mesh
        self.gather_group: dist.ProcessGroup = mesh.inner
        self.offload = offload
        self.main = self.new_zeros(plan.main_numel, plan.dtypes.main)
        self.packing: Packing | None = None
        if plan.gather_format is not None:
            self.packing = Packing(plan, mesh, lambda: self.moment()[0])
            self.packing.move(self.main)
        self.extension: Extension | None = None
        self.policy = MixedPrecisionPolicy()  # what the extension is told
        self.gradients: Gradients | None = None
        if plan.trainable:
            self.make_gradients()
        self.full: Tensor | None = None
        self.params: list[nn.Parameter] = []
        self._gathered_at: Moment | None = None
        self._inner: Tensor | None = None  # [I] gathered over the outer axis
        self._inner_at: Moment | None = None
        self._prefetched: _Prefetched | None = None

    def make_gradients(self) -> None:
        """Give memory to main grads, also where parameters were frozen when they were sharded."""
        grad = self.new_zeros(self.plan.main_numel, self.dtypes.grad)
        self.gradients = Gradients(self.plan, self.mesh, grad, self.device, self.new_whole)

    def new_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for main weights or main grads."""
        memory = self.memory
        if memory.pinned:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        return zeros_flat(numel, dtype, memory.device)

    def new_whole(self, dtype: torch.dtype) -> Tensor:
        """Return [B], undefined, for whole weights or gradients."""
        return torch.empty(self.layout.total_numel, dtype=dtype, device=self.device)

    @property
    def memory(self) -> "Memory":
        """Where main weights and main grads are."""
        if self.offload is None or self.device.type == "meta":
            return Memory(self.device, pinned=False)
        pinned = self.offload.pin_memory and self.device.type == "cuda"
        return Memory(torch.device("cpu"), pinned=pinned)

    def cast(self, dtypes: BufferDtypes) -> None:
        """Go on with other dtypes, in new memory; the layout stays."""
        self.reshard(outside=True)
        main = self.main
        self.dtypes = dtypes
        self.plan = replace(self.plan, dtypes=dtypes)
        self.main = self.new_zeros(self.plan.main_numel, dtypes.main)
        self.main.copy_(main)
        self._move_packing()
        if self.gradients is not None:
            self.make_gradients()

    @property
    def trainable(self) -> bool:
        return any(param.requires_grad for param in self.params)

    @property
    def grad(self) -> Tensor | None:
        """[S] main grads, [B] where nothing is sharded; None if it was frozen from the start."""
        return None if self.gradients is None else self.gradients.main

    def leave_meta(self, device: torch.device) -> None:
        """Take note of where a buffer will compute that has no memory yet."""
        if self.device.type == "meta":
            self.device = torch.empty(0, device=device).device  # with its index
            if self.gradients is not None:
                self.gradients.device = self.device

    def move(self, main: Tensor, grad: Tensor | None) -> None:
        """Copy into other memory, where the shards of all units are neighbours."""
        from_meta = self.main.is_meta
        if not from_meta:
            main.copy_(self.main)
        # Its own counter of writes, where the memory of all units is one tensor.
        place = main.untyped_storage(), main.storage_offset(), main.shape, main.stride()
        self.main = main.new_empty(0).set_(*place)
        self._move_packing()
        if grad is not None and self.gradients is not None:
            if not from_meta:
                grad.copy_(self.gradients.main)
            self.gradients.main = grad

    def _move_packing(self) -> None:
        if self.packing is not None:
            self.packing.move(self.main)

    def local_view(self, flat: Tensor, slot: Slot) -> Tensor:
        if not self.sharded:
            return self.full_view(flat, slot)
        rows = self.local_rows(slot)
        part = flat.narrow(0, rows.shard_offset, rows.numel)
        return part.view(rows.num_rows, *slot.shape[1:])

    def local_rows(self, slot: Slot) -> LocalRows:
        """Return which rows of a parameter this rank holds; all where nothing is sharded."""
        if not self.sharded:
            return LocalRows(0, slot.num_rows, slot.offset, slot.numel)
        return self.layout.local_rows(slot, self.mesh.part)

    @staticmethod
    def full_view(flat: Tensor, slot: Slot) -> Tensor:
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def whole_weight(self, slot: Slot) -> Tensor:
        """Return a parameter as modules compute with it, while it is gathered."""
        assert self.full is not None
        if self.extension is not None:
            assert self.extension.weight is not None
            return self.extension.weight
        return self.full_view(self.full, slot)

    def placements(self, slot: Slot) -> list[Placement]:
        return self.mesh.placements(self.layout, slot, sharded=self.sharded)

    def wrapped_view(self, slot: Slot) -> Tensor:
        """Return this rank's main weight of a parameter as the parameter holds it."""
        view = self.local_view(self.main, slot)
        return view if self.extension is None else self.extension.wrap(view)

    def load(self, slot: Slot, value: Tensor) -> None:
        """Copy one parameter's whole value, the same on every rank, into the main weights."""
        if self.sharded:
            rows = self.local_rows(slot)
            value = value.narrow(0, rows.first_row, rows.num_rows)
        self.local_view(self.main, slot).copy_(value)

    def unshard(self) -> Tensor:
        """Return [B] gathered weights in the compute dtype.

        Capture: one cast if the dtypes differ, one all-gather; the result of ZeRO-3 is from the
            graph's pool. Where the optimizer's part is cut over the outer axis too, one more
            all-gather over that axis, once an iteration. For 8 bits see Packing.
        """
        self._receive()
        if self.full is not None:
            return self.full
        self._gathered_at = self.moment()
        if not self.sharded:
            self.full = self._as_weights(self._source())
        else:
            source = self._unshard_outside()
            whole = self._new_whole(source)
            if whole.numel():
                all_gather_(whole, source, self.gather_group)
            self.full = self._as_weights(whole)
        return self.full

    def begin_unshard(self, lane: Lane) -> None:
        """Begin to gather weights that are not here. Capture: as ``unshard``, which adds a wait."""
        if self.full is not None or self.is_prefetched or not self.sharded:
            return
        if self.layout.total_numel:
            packs_first = self.packing is not None and self.packing.is_old
            gathers_outside = self.mesh.cuts_outside and self._inner is None
            if packs_first or gathers_outside or self.extension is not None:
                lane.join()  # those collectives are on the current stream
            source = self._unshard_outside()
            whole = self._new_whole(source)
            transfer = Transfer(whole, source)
            with lane.begun():
                all_gather_(whole, source, self.gather_group, transfer)
            self._prefetched = _Prefetched(whole, transfer, self.moment())

    @property
    def is_prefetched(self) -> bool:
        return self._prefetched is not None

    def drop_prefetched(self) -> None:
        """Forget weights that were gathered ahead, as soon as they are here."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched.transfer.wait()

    def moment(self) -> Moment:
        """Another value after each write into weights; one through a DTensor counts there alone."""
        writes = sum(version_of(tensor) for tensor in (self.main, *self.params))
        return writes, torch.is_inference_mode_enabled()

    @property
    def gathered(self) -> list[object]:
        """What was made of main weights, and can be made again."""
        whole = [] if self.full is self.main else [self.full]
        return [*whole, self._inner, self._prefetched]

    @property
    def copy(self) -> Tensor | None:
        """The whole weights [B], if there are any and a write into them would be lost."""
        return None if self.full is self.main else self.full

    @property
    def is_old(self) -> bool:
        """Whether somebody has written weights since they were gathered."""
        now = self.moment()
        old_inside = self.copy is not None and self._gathered_at != now
        return old_inside or (self._inner is not None and self._inner_at != now)

    def _receive(self) -> None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            return
        prefetched.transfer.wait()
        self._gathered_at = prefetched.moment
        if prefetched.moment == self.moment():
            self.full = self._as_weights(prefetched.whole)
        else:
            # Somebody has written main weights since (a hook that clips them, say), or they were
            # gathered inside torch.inference_mode and are used outside of it.
            self._inner = None  # as old

    def _new_full(self) -> Tensor:
        return self.new_whole(self.dtypes.compute)

    def _new_whole(self, source: Tensor) -> Tensor:
        """Return memory for what an all-gather brings: weights, or their bytes."""
        if self.packing is None and self.extension is None:
            return self._new_full()
        return source.new_empty(self.mesh.inner.size() * source.numel())

    def _source(self) -> Tensor:
        """Return this rank's part of it: the main weights themselves, if they fit."""
        if self.extension is not None:
            param: Any = self.params[0]
            return self.extension.before_gather(local_tensor_of(param), self.policy)
        if self.packing is None:
            return self.main.to(self.device, self.dtypes.compute)
        self.packing.refresh()
        return self.packing.packed

    def _as_weights(self, whole: Tensor) -> Tensor:
        if self.extension is not None:
            self.extension.after_gather(whole, self.layout.num_ranks)
        if self.packing is None:
            return whole
        full = self._new_full()
        self.packing.unpack(whole, full)
        return full

    def _unshard_outside(self) -> Tensor:
        """Return [I], this rank's part for an all-gather over the inner axis."""
        if self._inner is not None:
            return self._inner
        source = self._source()
        if not self.mesh.cuts_outside or self.mesh.outer is None or not source.numel():
            return source
        inner = source.new_empty(source.numel() * self.mesh.num_outer)
        all_gather_(inner, source, self.mesh.outer)
        if self.plan.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS:
            self._inner_at = self.moment()
            self._inner = inner  # for the other gathers of the iteration
        return inner

    def reshard(self, *, outside: bool = False) -> None:
        """Drop gathered weights, also those on their way; ``outside``: the outer axis's, too."""
        self.drop_prefetched()
        self.full = None
        if self.extension is not None:
            self.extension.weight = None
        if outside:
            self._inner = None


def version_of(tensor: Tensor) -> int:
    """Return what counts the writes into a tensor, where that is counted."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Reduction:
    """What the ranks' gradients come to: their mean or sum, or the sum divided by a number."""

    kind: str
    divisor: float | None = None

    @property
    def collective(self) -> str:
        return self.kind if self.divisor is None else "sum"


class How(NamedTuple):
    """How gradients are reduced.

    ``accumulate``: main grads hold something that must stay. Without ``outside`` gradients are
    reduced over the inner axis alone, and wait for a reduction with it. ``hooks`` get what all
    ranks have reduced, [S], before it is added, and may change it.
    """

    accumulate: bool
    reduction: Reduction
    outside: bool
    hooks: "Callable[[Gradients, Tensor], None] | None" = None


class _Reducing(NamedTuple):
    """A reduction that has begun, over the inner axis (``inside``) or the outer one."""

    how: How
    lane: Lane | None
    transfer: Transfer | None  # None where it was waited for at once
    reduced: Tensor
    target: Tensor  # where that belongs
    adds: bool  # onto it, or over it
    inside: bool


class Gradients:
    """The gradients of one buffer: whole until all ranks have reduced them into its main grads.

    ``accumulate`` means everywhere that the main grads hold something that must stay. ``device`` is
    where gradients are computed; main grads may be in the memory of the CPU. ``landed``: indices of
    slots that got a gradient since main grads were bound to parameters.
    """

    def __init__(
        self,
        plan: BufferPlan,
        mesh: UnitMesh,
        main: Tensor,
        device: torch.device,
        new_whole: Callable[[torch.dtype], Tensor],  # [B] in the memory of ``device``
    ) -> None:
        self.main = main
        self.device = device
        self.landed: set[int] = set()
        self._layout = plan.layout
        self._gaps = list(_gaps(plan.layout))
        self._comm_dtype = plan.dtypes.comm
        self._sharded = plan.sharded
        self._cuts_outside = plan.sharded and mesh.cuts_outside
        self._inner, self._outer = mesh.inner, mesh.outer
        self._num_experts_ranks = mesh.num_experts_ranks
        self._new_whole = new_whole
        self._partial: Tensor | None = None  # [I] reduced over the inner axis, not the outer one
        self._full: Tensor | None = None  # [B] not yet reduced
        self._written: set[int] = set()  # slots of it that hold something, by index
        self._added_by_layer: set[int] = set()  # of these, in this backward pass
        self._reducing: _Reducing | None = None

    @property
    def is_pending(self) -> bool:
        return self._full is not None or self._partial is not None

    def forget(self) -> None:
        self._full = None
        self._partial = None
        self._written.clear()
        self._added_by_layer.clear()
        self.landed.clear()

    @property
    def _comm_is_main(self) -> bool:
        return self._comm_dtype == self.main.dtype and not self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        return self.main.device != self.device

    def add(self, grads: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Add one backward pass's gradients, each whole, in slot order.

        What autograd has for a weight to whose gradient its layer has added (``view``) is a dummy.

        Capture: the copies of `copy_all` or one add per gradient, into a buffer from the graph's
            pool; where nothing is sharded, into the main grads themselves.
        """
        targets, sources = [], []
        for slot, grad in zip(self._layout.slots, grads, strict=True):
            if slot.index in self._added_by_layer:
                continue
            target = self._place(slot, accumulate=accumulate)
            if grad is not None:
                self.landed.add(slot.index)
            if slot.index in self._written:
                if grad is not None:
                    target.add_(grad)
                continue
            self._written.add(slot.index)
            if grad is None:
                target.zero_()
            else:
                targets.append(target)
                sources.append(grad)
        self._added_by_layer.clear()
        copy_all(targets, sources)

    def view(self, slot: Slot, *, accumulate: bool, by_layer: bool) -> Tensor:
        """A whole gradient, zeroed once an iteration, for somebody who adds to it.

        With ``by_layer`` a layer does so by itself, and gives autograd a dummy.
        """
        target = self._place(slot, accumulate=accumulate)
        self.landed.add(slot.index)
        if by_layer:
            self._added_by_layer.add(slot.index)
        if slot.index not in self._written:
            self._written.add(slot.index)
            target.zero_()
        return target

    def _place(self, slot: Slot, *, accumulate: bool) -> Tensor:
        if self._full is None:
            self._full = self._new_full(accumulate=accumulate)
        return self._full.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def _new_full(self, *, accumulate: bool) -> Tensor:
        free = not accumulate and self._partial is None
        if not self._sharded and free and self._comm_is_main:
            return self.main
        full = self._new_whole(self._comm_dtype)
        # Padding is reduced too: whatever lay there must not become a NaN.
        gaps = [full.narrow(0, start, length) for start, length in self._gaps]
        if full.is_cuda and gaps:
            torch._foreach_zero_(gaps)  # one launch for all
        else:
            for gap in gaps:
                gap.zero_()
        return full

    def begin_reduce(self, lane: Lane | None, how: How) -> None:
        """Begin to reduce over all ranks, where there is something to; ``end_reduce`` follows.

        Without a lane, each collective is waited for at once.

        Capture: one collective; the first of an iteration writes straight into the main grads. With
            an outer axis one more for its last microbatch, which ``end_reduce`` begins. A lane adds
            a wait to each.
        """
        full, self._full = self._full, None
        self._written.clear()
        if full is not None and full.numel():
            self._begin_inside(full, lane, how)
        elif how.outside:
            self._begin_outside(lane, how)

    def end_reduce(self) -> None:
        """Wait for what has begun, and bring it to the main grads, over the outer axis as well."""
        reducing = self._land()
        if reducing is None or not reducing.inside or self._outer is None:
            return
        self._partial = reducing.target
        lane, how = reducing.lane, reducing.how
        del reducing  # with memory that the inner reduction has used
        if how.outside:
            self._begin_outside(lane, how)
            self._land()

    def abandon_reduce(self) -> None:
        """Wait for what has begun, whose memory is in use as long, and leave it at that."""
        reducing, self._reducing = self._reducing, None
        if reducing is not None and reducing.transfer is not None:
            reducing.transfer.wait()

    def _begin_inside(self, full: Tensor, lane: Lane | None, how: How) -> None:
        """Reduce [B] gradients over the inner axis into [I] of their own, or the main grads."""
        target, adds = self._partial, self._partial is not None
        if self._outer is None:
            target, adds = self.main, how.accumulate and full is not self.main
        elif target is None:
            # Main grads that hold something must not be reduced over the outer axis again.
            target = self.main
            if how.accumulate or self._cuts_outside or self._is_elsewhere:
                parts = self._inner.size() if self._sharded else 1
                target = full.new_empty(full.numel() // parts, dtype=self.main.dtype)
        assert target is not None
        reduced = full
        if self._sharded:
            straight = not adds and self._comm_is_main
            reduced = target if straight else full.new_empty(target.numel())
        transfer = _issue(lane, reduced, full, self._inner, how.reduction.collective)
        self._reducing = _Reducing(how, lane, transfer, reduced, target, adds, inside=True)

    def _begin_outside(self, lane: Lane | None, how: How) -> None:
        """Reduce what waits for it over the outer axis into the main grads."""
        if self._outer is None or self._partial is None:
            return
        partial, self._partial = self._partial, None
        adds = how.accumulate and partial is not self.main
        sent = reduced = partial.to(self._comm_dtype)  # the same tensor if they agree
        if self._cuts_outside:
            straight = not adds and self._comm_is_main
            reduced = self.main if straight else sent.new_empty(self.main.numel())
        transfer = _issue(lane, reduced, sent, self._outer, how.reduction.collective)
        self._reducing = _Reducing(how, lane, transfer, reduced, self.main, adds, inside=False)

    def _land(self) -> _Reducing | None:
        """Put what has been reduced where it belongs, and return it; None if there is nothing."""
        reducing, self._reducing = self._reducing, None
        if reducing is None:
            return None
        if reducing.transfer is not None:
            reducing.transfer.wait()
        reduced, target, reduction = reducing.reduced, reducing.target, reducing.how.reduction
        if reducing.inside and reduction.divisor is not None:
            reduced.div_(reduction.divisor)
        elif reducing.inside and reduction.kind == "mean" and self._num_experts_ranks > 1:
            reduced.mul_(1 / self._num_experts_ranks)
        if reducing.how.hooks is not None and (self._outer is None or not reducing.inside):
            reduced = reduced.to(target.device, target.dtype)
            reducing.how.hooks(self, reduced)
        if reducing.adds:
            target.add_(reduced.to(target.device))
        elif reduced is not target:
            target.copy_(reduced)
        return reducing


def _issue(
    lane: Lane | None, reduced: Tensor, sent: Tensor, group: dist.ProcessGroup, reduction: str
) -> Transfer | None:
    """Reduce in place, or from ``sent`` into a smaller ``reduced``; without a lane at once."""
    transfer = None if lane is None else Transfer(reduced, sent)
    with nullcontext() if lane is None else lane.begun():
        if reduced is sent:
            all_reduce_(reduced, group, reduction=reduction, transfer=transfer)
        else:
            reduce_scatter_(reduced, sent, group, reduction=reduction, transfer=transfer)
    return transfer


def _gaps(layout: BufferLayout) -> Iterator[tuple[int, int]]:
    """Yield start and length of every stretch that belongs to no parameter."""
    end = 0
    for slot in layout.slots:
        if slot.offset > end:
            yield end, slot.offset - end
        end = max(end, slot.end)
    if layout.total_numel > end:
        yield end, layout.total_numel - end
