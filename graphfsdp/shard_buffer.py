"""One flat buffer of a unit, cut into one shard per rank: weights, gathered weights, gradients.

Shapes: B = elements of the whole buffer; S = elements of one rank's main weights; I = B / ranks of
the inner axis = elements that a rank gives to an all-gather. I = S, unless the optimizer's part is
cut over an outer axis as well.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.collectives import all_gather_, all_reduce_, reduce_scatter_
from graphfsdp.config import ShardingStrategy
from graphfsdp.layout import BufferLayout, LocalRows, Slot
from graphfsdp.unit_mesh import UnitMesh
from graphfsdp.unit_plan import BufferDtypes


class ShardBuffer:
    """The storage of one BufferLayout on this rank.

    Attributes:
        layout: Where each parameter lies.
        main: [S] main weights; [B] where nothing is sharded.
        grad: [S] main grads, [B] where nothing is sharded; None for frozen parameters.
        full: [B] gathered weights while unsharded, else None.
    """

    layout: BufferLayout
    main: Tensor
    grad: Tensor | None
    full: Tensor | None

    def __init__(
        self,
        layout: BufferLayout,
        *,
        dtypes: BufferDtypes,
        device: torch.device,
        mesh: UnitMesh,
        strategy: ShardingStrategy,
        trainable: bool,
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.trainable = trainable
        self._device = device
        self.mesh = mesh
        self.group = mesh.inner
        self._strategy = strategy
        self.main = torch.zeros(self.main_numel, dtype=dtypes.main, device=device)
        self.grad = (
            torch.zeros(self.main_numel, dtype=dtypes.grad, device=device) if trainable else None
        )
        self.full = None
        self._inner: Tensor | None = None  # [I] gathered over the outer axis
        self._partial: Tensor | None = None  # [I] reduced over the inner axis, not the outer one
        self._full_grad: Tensor | None = None  # [B] not yet reduced
        self._written: set[int] = set()  # slots of it that hold something, by index

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only its part of the main weights."""
        return self._strategy is not ShardingStrategy.NO_SHARD

    @property
    def main_numel(self) -> int:
        """Elements of this rank's main weights."""
        return self.layout.shard_numel if self.sharded else self.layout.total_numel

    @property
    def inner_numel(self) -> int:
        """Elements that this rank gives to an all-gather over the inner axis."""
        return self.main_numel * (self.mesh.num_outer if self._cuts_outside else 1)

    @property
    def _cuts_outside(self) -> bool:
        return self.sharded and self.mesh.cuts_outside

    def move(self, main: Tensor, grad: Tensor | None) -> None:
        """Continue in other memory, where the shards of all units are neighbours.

        Args:
            main: [S] or [B], takes the contents of the main weights.
            grad: Likewise for the main grads.
        """
        from_meta = self.main.is_meta  # there is nothing to copy
        if not from_meta:
            main.copy_(self.main)
        self.main, self._device = main, main.device
        if grad is not None and self.grad is not None:
            if not from_meta:
                grad.copy_(self.grad)
            self.grad = grad

    def local_view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Return this rank's rows of one parameter, as a view of ``main`` or ``grad``."""
        if not self.sharded:
            return self.full_view(flat, slot)
        rows = self.local_rows(slot)
        part = flat.narrow(0, rows.shard_offset, rows.numel)
        return part.view(self.local_shape(slot))

    def local_shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of this rank's rows of one parameter."""
        if not self.sharded:
            return slot.shape
        return (self.local_rows(slot).num_rows, *slot.shape[1:])

    def local_rows(self, slot: Slot) -> LocalRows:
        """Return which rows of a parameter this rank holds; all where nothing is sharded."""
        if not self.sharded:
            return LocalRows(0, slot.num_rows, slot.offset, slot.numel)
        return self.layout.local_rows(slot, self.mesh.part)

    @staticmethod
    def full_view(flat: Tensor, slot: Slot) -> Tensor:
        """Return one whole parameter as a view of a [B] buffer."""
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def placements(self, slot: Slot) -> list[Placement]:
        """Return how a parameter lies on the mesh of the unit."""
        return self.mesh.placements(self.layout, slot, sharded=self.sharded)

    def load(self, values: Sequence[Tensor]) -> None:
        """Copy the parameters' values into the main weights.

        Args:
            values: One whole tensor per slot, in slot order; the same on every rank.
        """
        for slot, value in zip(self.layout.slots, values, strict=True):
            self.load_slot(slot, value)

    def load_slot(self, slot: Slot, value: Tensor) -> None:
        """Copy one parameter's whole value into the main weights."""
        if self.sharded:
            rows = self.local_rows(slot)
            value = value.narrow(0, rows.first_row, rows.num_rows)
        self.local_view(self.main, slot).copy_(value)

    def unshard(self) -> Tensor:
        """Return [B] gathered weights in the compute dtype, gathering them if need be.

        Capture: one cast if the dtypes differ, one all-gather; the result of ZeRO-3 is from the
            graph's pool. Where the optimizer's part is cut over the outer axis too, one more
            all-gather over that axis, once an iteration.
        """
        if self.full is not None:
            return self.full
        if not self.sharded:
            self.full = self.main.to(self.dtypes.compute)  # the main weights, if they fit
        else:
            source = self._unshard_outside()
            self.full = torch.empty(
                self.layout.total_numel, dtype=self.dtypes.compute, device=self._device
            )
            if self.full.numel():
                all_gather_(self.full, source, self.group)
        return self.full

    def _unshard_outside(self) -> Tensor:
        """Return [I], this rank's part for an all-gather over the inner axis."""
        if self._inner is not None:
            return self._inner
        source = self.main.to(self.dtypes.compute)  # the main weights themselves, if they fit
        if not self._cuts_outside or self.mesh.outer is None or not source.numel():
            return source
        inner = torch.empty(self.inner_numel, dtype=self.dtypes.compute, device=self._device)
        all_gather_(inner, source, self.mesh.outer)
        if self._strategy is ShardingStrategy.OPTIM_GRADS_PARAMS:
            self._inner = inner  # for the other gathers of the iteration
        return inner

    def reshard(self, *, outside: bool = False) -> None:
        """Drop the gathered weights.

        Args:
            outside: Also what was gathered over the outer axis, as when the main weights have
                changed.
        """
        self.full = None
        if outside:
            self._inner = None

    def add_gradients(self, grads: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Add one backward pass's gradients to what is to be reduced.

        Args:
            grads: One whole gradient per slot, in slot order; None where there is none.
            accumulate: The main grads hold something that must stay.

        Capture: one copy or add per gradient, into a buffer from the graph's pool; where
            nothing is sharded, into the main grads themselves.
        """
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            target = self._unreduced(slot, accumulate=accumulate)
            if slot.index in self._written:
                if grad is not None:
                    target.add_(grad)
                continue
            self._written.add(slot.index)
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad)

    def unreduced_gradient(self, slot: Slot, *, accumulate: bool) -> Tensor:
        """Return the whole gradient of one parameter for a layer that adds to it by itself.

        Args:
            slot: The parameter.
            accumulate: The main grads hold something that must stay.

        Capture: zeroed once an iteration.
        """
        target = self._unreduced(slot, accumulate=accumulate)
        if slot.index not in self._written:
            self._written.add(slot.index)
            target.zero_()
        return target

    def _unreduced(self, slot: Slot, *, accumulate: bool) -> Tensor:
        if self._full_grad is None:
            self._full_grad = self._new_full_grad(accumulate=accumulate)
        return self.full_view(self._full_grad, slot)

    def _new_full_grad(self, *, accumulate: bool) -> Tensor:
        free = not accumulate and self._partial is None
        if self.grad is not None and not self.sharded and free and self._comm_is_main:
            return self.grad
        numel = self.layout.total_numel
        full = torch.empty(numel, dtype=self.dtypes.comm, device=self._device)
        for start, length in _gaps(self.layout):
            # Padding is reduced too: whatever lay there must not become a NaN.
            full.narrow(0, start, length).zero_()
        return full

    @property
    def _comm_is_main(self) -> bool:
        return self.dtypes.comm == self.dtypes.grad

    def reduce(self, *, accumulate: bool, reduction: str, outside: bool = True) -> None:
        """Reduce the gathered gradients over all ranks into the main grads.

        Args:
            accumulate: Add to the main grads instead of overwriting them.
            reduction: "mean" or "sum".
            outside: Where there is an outer axis, reduce over it too; else the gradients wait,
                reduced over the inner axis alone, for a call that does.

        Capture: one collective; the first of an iteration writes straight into the main grads.
            With an outer axis one more for its last microbatch.
        """
        full, self._full_grad = self._full_grad, None
        self._written.clear()
        if full is None or self.grad is None or not full.numel():
            return
        if self.mesh.outer is None:
            adds = accumulate and full is not self.grad
            self._reduce_inside(full, self.grad, adds=adds, reduction=reduction)
            return
        held = self._partial
        if held is None:
            # Main grads that hold something must not be reduced over the outer axis again.
            held = self.grad
            if accumulate or self._cuts_outside:
                held = torch.empty(self.inner_numel, dtype=held.dtype, device=self._device)
        self._reduce_inside(full, held, adds=self._partial is not None, reduction=reduction)
        self._partial = held
        if outside:
            self._reduce_outside(self.mesh.outer, accumulate=accumulate, reduction=reduction)

    def _reduce_inside(self, full: Tensor, target: Tensor, *, adds: bool, reduction: str) -> None:
        """Reduce [B] gradients over the inner axis into [I] ``target``, or onto it."""
        if not self.sharded:
            all_reduce_(full, self.group, reduction=reduction)
            reduced = full
        elif not adds and self._comm_is_main:
            reduced = target
            reduce_scatter_(reduced, full, self.group, reduction=reduction)
        else:
            reduced = torch.empty(self.inner_numel, dtype=self.dtypes.comm, device=self._device)
            reduce_scatter_(reduced, full, self.group, reduction=reduction)
        if reduction == "mean" and self.mesh.num_experts_ranks > 1:
            reduced.mul_(1 / self.mesh.num_experts_ranks)
        _put(reduced, target, adds=adds)

    def _reduce_outside(
        self, outer: dist.ProcessGroup, *, accumulate: bool, reduction: str
    ) -> None:
        """Reduce what waits for it over the outer axis into the main grads."""
        partial, self._partial = self._partial, None
        assert partial is not None
        assert self.grad is not None
        adds = accumulate and partial is not self.grad
        reduced = partial.to(self.dtypes.comm)  # the same tensor if they agree
        if not self._cuts_outside:
            all_reduce_(reduced, outer, reduction=reduction)
        else:
            sent = reduced
            reduced = self.grad
            if adds or not self._comm_is_main:
                reduced = torch.empty(self.main_numel, dtype=sent.dtype, device=self._device)
            reduce_scatter_(reduced, sent, outer, reduction=reduction)
        _put(reduced, self.grad, adds=adds)

    def abandon_gradients(self) -> None:
        """Forget gradients that wait to be reduced."""
        self._full_grad = None
        self._partial = None
        self._written.clear()

    @property
    def has_pending_gradients(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._full_grad is not None or self._partial is not None


def _put(value: Tensor, target: Tensor, *, adds: bool) -> None:
    """Write a value over the target or onto it; nothing if it is there already."""
    if adds:
        target.add_(value)
    elif value is not target:
        target.copy_(value)


def _gaps(layout: BufferLayout) -> Iterator[tuple[int, int]]:
    """Yield start and length of every stretch that belongs to no parameter."""
    end = 0
    for slot in layout.slots:
        if slot.offset > end:
            yield end, slot.offset - end
        end = max(end, slot.end)
    if layout.total_numel > end:
        yield end, layout.total_numel - end


__all__ = ["ShardBuffer"]
