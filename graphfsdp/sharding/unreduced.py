"""Whole gradients of one flat buffer, until all ranks have reduced them into the main grads.

Shapes: B = elements of the whole buffer; S = elements of one rank's main grads; I = elements of
the buffer that a rank of the inner axis has after a reduction over that axis.
"""

from collections.abc import Generator, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import Transfer, all_reduce_, reduce_scatter_, under_way
from graphfsdp.base.streams import Lane
from graphfsdp.sharding.buffer_pool import BufferPool, take
from graphfsdp.sharding.layout import BufferLayout, Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.unit_plan import BufferDtypes

Reducing = Generator[None, None, None]  # yields while a collective is under way


class UnreducedGradients:
    """The gradients of one buffer on their way to its main grads.

    Attributes:
        pool: Where whole gradients get their memory; None allocates it.
    """

    def __init__(
        self, layout: BufferLayout, dtypes: BufferDtypes, mesh: UnitMesh, *, sharded: bool
    ) -> None:
        self._layout = layout
        self._dtypes = dtypes
        self._mesh = mesh
        self._sharded = sharded
        self.pool: BufferPool | None = None
        self._partial: Tensor | None = None  # [I] reduced over the inner axis, not the outer one
        self._full: Tensor | None = None  # [B] not yet reduced
        self._written: set[int] = set()  # slots of it that hold something, by index

    @property
    def is_pending(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._full is not None or self._partial is not None

    def forget(self) -> None:
        """Forget gradients that wait to be reduced."""
        self._full = None
        self._partial = None
        self._written.clear()

    @property
    def _cuts_outside(self) -> bool:
        return self._sharded and self._mesh.cuts_outside

    @property
    def _inner_numel(self) -> int:
        parts = self._mesh.inner.size() if self._sharded else 1
        return self._layout.total_numel // parts

    def add(self, main_grad: Tensor, grads: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Add one backward pass's gradients to what is to be reduced.

        Args:
            main_grad: [S] the main grads.
            grads: One whole gradient per slot, in slot order; None where there is none.
            accumulate: The main grads hold something that must stay.

        Capture: one copy or add per gradient, into a buffer from the graph's pool; where
            nothing is sharded, into the main grads themselves.
        """
        for slot, grad in zip(self._layout.slots, grads, strict=True):
            target = self._place(main_grad, slot, accumulate=accumulate)
            if slot.index in self._written:
                if grad is not None:
                    target.add_(grad)
                continue
            self._written.add(slot.index)
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad)

    def view(self, main_grad: Tensor, slot: Slot, *, accumulate: bool) -> Tensor:
        """Return the whole gradient of one parameter for a layer that adds to it by itself.

        Args:
            main_grad: [S] the main grads.
            slot: The parameter.
            accumulate: The main grads hold something that must stay.

        Capture: zeroed once an iteration.
        """
        target = self._place(main_grad, slot, accumulate=accumulate)
        if slot.index not in self._written:
            self._written.add(slot.index)
            target.zero_()
        return target

    def _place(self, main_grad: Tensor, slot: Slot, *, accumulate: bool) -> Tensor:
        if self._full is None:
            self._full = self._new_full(main_grad, accumulate=accumulate)
        return self._full.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def _new_full(self, main_grad: Tensor, *, accumulate: bool) -> Tensor:
        free = not accumulate and self._partial is None
        if not self._sharded and free and self._comm_is_main:
            return main_grad
        numel = self._layout.total_numel
        full = take(self.pool, self, numel, self._dtypes.comm, main_grad.device)
        for start, length in _gaps(self._layout):
            # Padding is reduced too: whatever lay there must not become a NaN.
            full.narrow(0, start, length).zero_()
        return full

    @property
    def _comm_is_main(self) -> bool:
        return self._dtypes.comm == self._dtypes.grad

    def reduce(
        self,
        main_grad: Tensor,
        lane: Lane | None,
        *,
        accumulate: bool,
        reduction: str,
        outside: bool = True,
    ) -> Reducing:
        """Reduce over all ranks into the main grads; see ShardBuffer.reduce.

        Capture: one collective; the first of an iteration writes straight into the main grads.
            With an outer axis one more for its last microbatch. A lane adds a wait to each.
        """
        full, self._full = self._full, None
        self._written.clear()
        if full is None or not full.numel():
            if outside and self._partial is not None and self._mesh.outer is not None:
                yield from self._reduce_outside(
                    self._mesh.outer, main_grad, lane, accumulate=accumulate, reduction=reduction
                )
            return
        if self._mesh.outer is None:
            adds = accumulate and full is not main_grad
            yield from self._reduce_inside(full, main_grad, lane, adds=adds, reduction=reduction)
            del full
            self._let_go()
            return
        held = self._partial
        if held is None:
            # Main grads that hold something must not be reduced over the outer axis again.
            held = main_grad
            if accumulate or self._cuts_outside:
                held = full.new_empty(self._inner_numel, dtype=main_grad.dtype)
        adds = self._partial is not None
        yield from self._reduce_inside(full, held, lane, adds=adds, reduction=reduction)
        self._partial = held
        del full
        self._let_go()
        if outside:
            yield from self._reduce_outside(
                self._mesh.outer, main_grad, lane, accumulate=accumulate, reduction=reduction
            )

    def _let_go(self) -> None:
        if self.pool is not None:
            self.pool.dropped(self)

    def _reduce_inside(
        self, full: Tensor, target: Tensor, lane: Lane | None, *, adds: bool, reduction: str
    ) -> Reducing:
        """Reduce [B] gradients over the inner axis into [I] ``target``, or onto it."""
        reduced = full
        if self._sharded:
            straight = not adds and self._comm_is_main
            reduced = target if straight else full.new_empty(self._inner_numel)
        yield from _collective(lane, reduced, full, self._mesh.inner, reduction)
        if reduction == "mean" and self._mesh.num_experts_ranks > 1:
            reduced.mul_(1 / self._mesh.num_experts_ranks)
        _put(reduced, target, adds=adds)

    def _reduce_outside(
        self,
        outer: dist.ProcessGroup,
        main_grad: Tensor,
        lane: Lane | None,
        *,
        accumulate: bool,
        reduction: str,
    ) -> Reducing:
        """Reduce what waits for it over the outer axis into the main grads."""
        partial, self._partial = self._partial, None
        assert partial is not None
        adds = accumulate and partial is not main_grad
        sent = reduced = partial.to(self._dtypes.comm)  # the same tensor if they agree
        if self._cuts_outside:
            straight = not adds and self._comm_is_main
            reduced = main_grad if straight else sent.new_empty(main_grad.numel())
        yield from _collective(lane, reduced, sent, outer, reduction)
        _put(reduced, main_grad, adds=adds)


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
