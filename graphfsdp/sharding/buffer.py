"""One flat buffer of a unit, cut into one shard per rank: weights, gathered weights, gradients.

Shapes: B = elements of the whole buffer; S = elements of one rank's main weights; I = B / ranks of
the inner axis = elements that a rank gives to an all-gather. I = S, unless the optimizer's part is
cut over an outer axis as well.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.collectives import all_gather_
from graphfsdp.base.host_memory import zeros_flat
from graphfsdp.base.streams import Lane
from graphfsdp.config import ShardingStrategy
from graphfsdp.sharding.buffer_pool import BufferPool, take
from graphfsdp.sharding.layout import BufferLayout, LocalRows, Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.prefetched import Prefetched
from graphfsdp.sharding.unit_plan import BufferDtypes
from graphfsdp.sharding.unreduced import Reducing, UnreducedGradients
from graphfsdp.sharding.weight_writes import Moment, moment_of


class ShardBuffer:
    """The storage of one BufferLayout on this rank.

    Attributes:
        layout: Where each parameter lies.
        main: [S] main weights; [B] where nothing is sharded.
        grad: [S] main grads, [B] where nothing is sharded; None for frozen parameters.
        full: [B] gathered weights while unsharded, else None.
        params: What the optimizer and the user see of the main weights.
        gather_group: The communicator of all-gathers over the inner axis: one of their own, so
            that they do not queue behind reductions, or that of the axis.
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
        self.gather_group: dist.ProcessGroup = mesh.inner
        self._pool: BufferPool | None = None
        self._strategy = strategy
        self.main = zeros_flat(self.main_numel, dtypes.main, device)
        self.grad = zeros_flat(self.main_numel, dtypes.grad, device) if trainable else None
        self.full = None
        self.params: list[nn.Parameter] = []
        self._gathered_at: Moment | None = None
        self._inner: Tensor | None = None  # [I] gathered over the outer axis
        self._inner_at: Moment | None = None
        self._prefetched: Prefetched | None = None
        self._unreduced = UnreducedGradients(layout, dtypes, mesh, sharded=self.sharded)

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
        # Its own counter of writes, where the memory of all units is one tensor.
        place = main.untyped_storage(), main.storage_offset(), main.shape, main.stride()
        self.main, self._device = main.new_empty(0).set_(*place), main.device
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
        self._receive()
        if self.full is not None:
            return self.full
        self._gathered_at = self.moment()
        if not self.sharded:
            self.full = self.main.to(self.dtypes.compute)  # the main weights, if they fit
        else:
            source = self._unshard_outside()
            self.full = self._new_full()
            if self.full.numel():
                all_gather_(self.full, source, self.gather_group)
        return self.full

    def begin_unshard(self, lane: Lane) -> None:
        """Begin to gather weights that are not here; ``unshard`` waits for them.

        Args:
            lane: Where the all-gather runs meanwhile.

        Capture: as ``unshard``, which adds a wait.
        """
        if self.full is not None or self.is_prefetched or not self.sharded:
            return
        if self.layout.total_numel:
            source, full = self._unshard_outside(), self._new_full()
            self._prefetched = Prefetched.begin(
                self.moment(), source, full, self.gather_group, lane
            )

    @property
    def is_prefetched(self) -> bool:
        """Whether weights are being gathered ahead of their use."""
        return self._prefetched is not None

    def drop_prefetched(self) -> None:
        """Forget weights that were gathered ahead, as soon as they are here."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched.transfer.wait()

    def moment(self) -> Moment:
        """Return what is another value after each write into the weights."""
        return moment_of((self.main, *self.params))

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
        if prefetched is not None:
            self.full = prefetched.receive(self.moment())
            self._gathered_at = prefetched.moment
            if self.full is None:
                self._inner = None  # that is as old

    def _new_full(self) -> Tensor:
        return take(self._pool, self, self.layout.total_numel, self.dtypes.compute, self._device)

    def use_pool(self, pool: BufferPool) -> None:
        """Take memory for whole weights and gradients from a pool from now on."""
        self._pool = self._unreduced.pool = pool

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
            self._inner_at = self.moment()
            self._inner = inner  # for the other gathers of the iteration
        return inner

    def reshard(self, *, outside: bool = False) -> None:
        """Drop the gathered weights, also those that are still on their way.

        Args:
            outside: Also what was gathered over the outer axis, as when the main weights have
                changed.
        """
        self.drop_prefetched()
        was_whole, self.full = self.full is not None, None
        if was_whole and self._pool is not None:
            self._pool.dropped(self)
        if outside:
            self._inner = None

    def add_gradients(self, grads: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Add one backward pass's gradients to what is to be reduced.

        Args:
            grads: One whole gradient per slot, in slot order; None where there is none.
            accumulate: The main grads hold something that must stay.

        Capture: see UnreducedGradients.add.
        """
        assert self.grad is not None
        self._unreduced.add(self.grad, grads, accumulate=accumulate)

    def unreduced_gradient(self, slot: Slot, *, accumulate: bool) -> Tensor:
        """Return the whole gradient of one parameter for a layer that adds to it by itself.

        Args:
            slot: The parameter.
            accumulate: The main grads hold something that must stay.

        Capture: zeroed once an iteration.
        """
        assert self.grad is not None
        return self._unreduced.view(self.grad, slot, accumulate=accumulate)

    def reduce(
        self, lane: Lane | None, *, accumulate: bool, reduction: str, outside: bool = True
    ) -> Reducing:
        """Reduce the gathered gradients over all ranks into the main grads.

        Args:
            lane: Where a collective runs while others compute; None waits for it at once.
            accumulate: Add to the main grads instead of overwriting them.
            reduction: "mean" or "sum".
            outside: Where there is an outer axis, reduce over it too; else the gradients wait,
                reduced over the inner axis alone, for a call that does.

        Yields:
            When a collective is under way. The main grads are complete at the end.

        Capture: see UnreducedGradients.reduce.
        """
        assert self.grad is not None
        return self._unreduced.reduce(
            self.grad, lane, accumulate=accumulate, reduction=reduction, outside=outside
        )

    def abandon_gradients(self) -> None:
        """Forget gradients that wait to be reduced."""
        self._unreduced.forget()

    @property
    def has_pending_gradients(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._unreduced.is_pending
