"""One flat buffer of a unit, cut into one shard per rank: weights, gathered weights, gradients.

Shapes: B = elements of the whole buffer; S = B / R = elements of one rank's shard; R = ranks.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.collectives import all_gather_, all_reduce_, reduce_scatter_
from graphfsdp.config import ShardingStrategy
from graphfsdp.layout import BufferLayout, Slot
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
        group: dist.ProcessGroup,
        strategy: ShardingStrategy,
        trainable: bool,
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.trainable = trainable
        self._device = device
        self.group = group
        self._rank = group.rank()
        self._strategy = strategy
        self.main = torch.zeros(self.main_numel, dtype=dtypes.main, device=device)
        self.grad = (
            torch.zeros(self.main_numel, dtype=dtypes.grad, device=device) if trainable else None
        )
        self.full = None
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

    def move(self, main: Tensor, grad: Tensor | None) -> None:
        """Continue in other memory, where the shards of all units are neighbours.

        Args:
            main: [S] or [B], takes the contents of the main weights.
            grad: Likewise for the main grads.
        """
        main.copy_(self.main)
        self.main = main
        if grad is not None and self.grad is not None:
            grad.copy_(self.grad)
            self.grad = grad

    def local_view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Return this rank's rows of one parameter, as a view of ``main`` or ``grad``."""
        if not self.sharded:
            return self.full_view(flat, slot)
        rows = self.layout.local_rows(slot, self._rank)
        part = flat.narrow(0, rows.shard_offset, rows.numel)
        return part.view(self.local_shape(slot))

    def local_shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of this rank's rows of one parameter."""
        if not self.sharded:
            return slot.shape
        return (self.layout.local_rows(slot, self._rank).num_rows, *slot.shape[1:])

    @staticmethod
    def full_view(flat: Tensor, slot: Slot) -> Tensor:
        """Return one whole parameter as a view of a [B] buffer."""
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def load(self, values: Sequence[Tensor]) -> None:
        """Copy the parameters' values into the main weights.

        Args:
            values: One whole tensor per slot, in slot order; the same on every rank.
        """
        for slot, value in zip(self.layout.slots, values, strict=True):
            local = self.local_view(self.main, slot)
            if not self.sharded:
                local.copy_(value)
                continue
            rows = self.layout.local_rows(slot, self._rank)
            local.copy_(value.narrow(0, rows.first_row, rows.num_rows))

    def unshard(self) -> Tensor:
        """Return [B] gathered weights in the compute dtype, gathering them if need be.

        Capture: one cast if the dtypes differ, one all-gather; the result of ZeRO-3 is from the
            graph's pool.
        """
        if self.full is not None:
            return self.full
        source = self.main.to(self.dtypes.compute)  # the main weights themselves, if they fit
        if not self.sharded:
            self.full = source
        else:
            self.full = torch.empty(
                self.layout.total_numel, dtype=self.dtypes.compute, device=self._device
            )
            if self.full.numel():
                all_gather_(self.full, source, self.group)
        return self.full

    def reshard(self) -> None:
        """Drop the gathered weights."""
        self.full = None

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
        if self.grad is not None and not self.sharded and not accumulate and self._comm_is_main:
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

    def reduce(self, *, accumulate: bool, reduction: str) -> None:
        """Reduce the gathered gradients over all ranks into the main grads.

        Args:
            accumulate: Add to the main grads instead of overwriting them.
            reduction: "mean" or "sum".

        Capture: one collective; the first of an iteration writes straight into the main grads.
        """
        full, self._full_grad = self._full_grad, None
        self._written.clear()
        if full is None or self.grad is None or not full.numel():
            return
        direct = not accumulate and self._comm_is_main
        if not self.sharded:
            all_reduce_(full, self.group, reduction=reduction)
            reduced = full
        else:
            reduced = (
                self.grad
                if direct
                else torch.empty(self.main_numel, dtype=self.dtypes.comm, device=self._device)
            )
            reduce_scatter_(reduced, full, self.group, reduction=reduction)
        if accumulate and reduced is not self.grad:
            self.grad.add_(reduced)
        elif reduced is not self.grad:
            self.grad.copy_(reduced)

    def abandon_gradients(self) -> None:
        """Forget gradients that wait to be reduced."""
        self._full_grad = None
        self._written.clear()

    @property
    def has_pending_gradients(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._full_grad is not None


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
