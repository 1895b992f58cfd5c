"""The gradients of one flat buffer: whole until all ranks have reduced them into the main grads.

Shapes: B = elements of the whole buffer; S = elements of one rank's main grads ([B] where nothing
is sharded); I = elements of the buffer that a rank of the inner axis has after a reduction over
that axis.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import Transfer, all_reduce_, reduce_scatter_, under_way
from graphfsdp.base.flat_buffer import copy_all
from graphfsdp.base.streams import Lane
from graphfsdp.sharding.layout import BufferLayout, Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.plan import BufferPlan

Reducing = Generator[None, None, None]  # yields while a collective is under way


@dataclass(frozen=True)
class Reduction:
    """What the ranks' gradients come to: their mean or sum, or the sum divided by a number."""

    kind: str
    divisor: float | None = None

    @property
    def collective(self) -> str:
        return self.kind if self.divisor is None else "sum"


class Gradients:
    """The gradients of one buffer on their way to its [S] main grads.

    ``accumulate`` means everywhere that the main grads hold something that must stay. ``device`` is
    where gradients are computed; main grads may be in the memory of the CPU.
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
        self._layout = plan.layout
        self._comm_dtype = plan.dtypes.comm
        self._sharded = plan.sharded
        self._mesh = mesh
        self._new_whole = new_whole
        self._partial: Tensor | None = None  # [I] reduced over the inner axis, not the outer one
        self._full: Tensor | None = None  # [B] not yet reduced
        self._written: set[int] = set()  # slots of it that hold something, by index

    @property
    def is_pending(self) -> bool:
        return self._full is not None or self._partial is not None

    def forget(self) -> None:
        self._full = None
        self._partial = None
        self._written.clear()

    @property
    def _cuts_outside(self) -> bool:
        return self._sharded and self._mesh.cuts_outside

    @property
    def _comm_is_main(self) -> bool:
        return self._comm_dtype == self.main.dtype and not self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        return self.main.device != self.device

    def add(self, grads: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Add one backward pass's gradients, each whole, in slot order.

        Capture: the copies of `copy_all` or one add per gradient, into a buffer from the graph's
            pool; where nothing is sharded, into the main grads themselves.
        """
        targets, sources = [], []
        for slot, grad in zip(self._layout.slots, grads, strict=True):
            target = self._place(slot, accumulate=accumulate)
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
        copy_all(targets, sources)

    def view(self, slot: Slot, *, accumulate: bool) -> Tensor:
        """A whole gradient, zeroed once an iteration, for a layer that adds to it by itself."""
        target = self._place(slot, accumulate=accumulate)
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
        gaps = [full.narrow(0, start, length) for start, length in _gaps(self._layout)]
        if full.is_cuda and gaps:
            torch._foreach_zero_(gaps)  # one launch for all
        else:
            for gap in gaps:
                gap.zero_()
        return full

    def reduce(
        self, lane: Lane | None, *, accumulate: bool, reduction: Reduction, outside: bool = True
    ) -> Reducing:
        """Reduce over all ranks into the main grads; yields when a collective is under way.

        Without a lane, each is waited for at once. Without ``outside``, gradients are reduced over
        the inner axis alone, and wait for a call with it.

        Capture: one collective; the first of an iteration writes straight into the main grads. With
            an outer axis one more for its last microbatch. A lane adds a wait to each.
        """
        full, self._full = self._full, None
        self._written.clear()
        outer = self._mesh.outer
        if full is not None and full.numel():
            target, adds = self._partial, self._partial is not None
            if outer is None:
                target, adds = self.main, accumulate and full is not self.main
            elif target is None:
                # Main grads that hold something must not be reduced over the outer axis again.
                target = self.main
                if accumulate or self._cuts_outside or self._is_elsewhere:
                    parts = self._mesh.inner.size() if self._sharded else 1
                    numel = self._layout.total_numel // parts
                    target = full.new_empty(numel, dtype=self.main.dtype)
            yield from self._reduce_inside(full, target, lane, adds=adds, reduction=reduction)
            if outer is not None:
                self._partial = target
            del full
        if outer is not None and outside and self._partial is not None:
            yield from self._reduce_outside(outer, lane, accumulate=accumulate, reduction=reduction)

    def _reduce_inside(
        self, full: Tensor, target: Tensor, lane: Lane | None, *, adds: bool, reduction: Reduction
    ) -> Reducing:
        """Reduce [B] gradients over the inner axis into [I] ``target``, or onto it."""
        reduced = full
        if self._sharded:
            straight = not adds and self._comm_is_main
            reduced = target if straight else full.new_empty(target.numel())
        yield from _collective(lane, reduced, full, self._mesh.inner, reduction.collective)
        if reduction.divisor is not None:
            reduced.div_(reduction.divisor)
        elif reduction.kind == "mean" and self._mesh.num_experts_ranks > 1:
            reduced.mul_(1 / self._mesh.num_experts_ranks)
        _put(reduced, target, adds=adds)

    def _reduce_outside(
        self, outer: dist.ProcessGroup, lane: Lane | None, *, accumulate: bool, reduction: Reduction
    ) -> Reducing:
        """Reduce what waits for it over the outer axis into the main grads."""
        partial, self._partial = self._partial, None
        assert partial is not None
        adds = accumulate and partial is not self.main
        sent = reduced = partial.to(self._comm_dtype)  # the same tensor if they agree
        if self._cuts_outside:
            straight = not adds and self._comm_is_main
            reduced = self.main if straight else sent.new_empty(self.main.numel())
        yield from _collective(lane, reduced, sent, outer, reduction.collective)
        _put(reduced, self.main, adds=adds)


def _collective(
    lane: Lane | None, reduced: Tensor, sent: Tensor, group: dist.ProcessGroup, reduction: str
) -> Reducing:
    """Reduce in place, or from ``sent`` into a smaller ``reduced``."""

    def issue(transfer: Transfer | None) -> None:
        if reduced is sent:
            all_reduce_(reduced, group, reduction=reduction, transfer=transfer)
        else:
            reduce_scatter_(reduced, sent, group, reduction=reduction, transfer=transfer)

    yield from under_way(lane, reduced, sent, issue)


def _put(value: Tensor, target: Tensor, *, adds: bool) -> None:
    """Write a value over the target or onto it; nothing if it is there already."""
    if adds:
        target.add_(value.to(target.device))
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
