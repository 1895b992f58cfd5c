"""One flat buffer of a unit, cut into one shard per rank: weights, gathered weights, gradients.

Shapes: B = elements of the whole buffer; S = elements of one rank's main weights and main grads
([B] where nothing is sharded); I = B / ranks of the inner axis = elements that a rank gives to an
all-gather, and has after a reduction over that axis. I = S, unless the optimizer's part is cut over
an outer axis as well.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.collectives import Transfer, all_gather_
from graphfsdp.base.joined import JoinedGather, joined
from graphfsdp.base.streams import Lane, keep_for_current
from graphfsdp.base.torch_internals import local_tensor_of
from graphfsdp.config import ShardingStrategy
from graphfsdp.sharding.extension import Extension
from graphfsdp.sharding.gradients import BufferMemory, Gradients, shaped
from graphfsdp.sharding.layout import BufferDtypes, BufferPlan, LocalRows, Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.packing import Packing

Moment = tuple[int, bool]


class _Gather(NamedTuple):
    whole: Tensor  # [B] where the weights arrive, or their bytes
    sent: Tensor  # by this rank
    group: dist.ProcessGroup
    of_parts: bool = False  # of whole weights, which few ranks have kept


class _Prefetched(NamedTuple):
    gather: _Gather
    transfer: Transfer | JoinedGather
    moment: Moment  # what must not have changed when the weights are used

    def wait(self) -> None:
        self.transfer.wait()
        keep_for_current([self.gather.whole], self.transfer.made_on)


class ShardBuffer(BufferMemory):
    """One BufferPlan's storage on this rank: [S] main weights, [B] gathered ones while unsharded.

    ``params``: what the optimizer and the user see of the main weights. ``gather_group``: of
    all-gathers alone where possible, so that they do not queue behind reductions. ``few_ranks``:
    those that share whole weights between forward and backward, where not all do; each keeps
    [B / ranks] of them, from which backward gathers.
    """

    def __init__(
        self,
        plan: BufferPlan,
        mesh: UnitMesh,
        device: torch.device,
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        super().__init__(plan, mesh, device, offload)
        self.gather_group: dist.ProcessGroup = mesh.inner
        self.few_ranks: dist.ProcessGroup | None = None
        self._part: Tensor | None = None
        self._part_at: Moment | None = None
        self.main = self.new_zeros(plan.main_numel, plan.dtypes.main)
        self.packing: Packing | None = None
        if plan.gather_format is not None:
            self.packing = Packing(plan, mesh, lambda: self.moment()[0])
            self.packing.move(self.main)
        self.extension: Extension | None = None
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
        self.gradients = Gradients(self)

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
        rows = self._local_rows(slot)
        part = flat.narrow(0, rows.shard_offset, rows.numel)
        return shaped(part, slot, rows.num_rows)

    def _local_rows(self, slot: Slot) -> LocalRows:
        return self.layout.local_rows(slot, self.mesh.part)

    @staticmethod
    def full_view(flat: Tensor, slot: Slot) -> Tensor:
        return shaped(flat.narrow(0, slot.offset, slot.numel), slot)

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
            rows = self._local_rows(slot)
            value = value.narrow(slot.dim, rows.first_row, rows.num_rows)
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
            self.full = self._as_weights(self._source(None, None))
        else:
            gather = self._next_gather()
            if gather.whole.numel():
                all_gather_(gather.whole, gather.sent, gather.group)
            self.full = self._arrived(gather)
        return self.full

    def _begin_gather(self, lane: Lane) -> _Gather:
        """Bring what will be gathered to where it is sent from. Capture: a cast, at most."""
        packs_first = self.packing is not None and self.packing.is_old
        gathers_outside = self.mesh.cuts_outside and self._inner is None
        if packs_first or gathers_outside or self.extension is not None:
            lane.join()  # those collectives are on the current stream
        return self._next_gather()

    @property
    def whole_bytes(self) -> int:
        return self.layout.total_numel * self.dtypes.compute.itemsize

    @property
    def is_missing(self) -> bool:
        """Whether whole weights are neither here nor on their way."""
        here = self.full is not None or self.is_prefetched
        return self.sharded and not here and self.layout.total_numel > 0

    @property
    def is_prefetched(self) -> bool:
        return self._prefetched is not None

    def drop_prefetched(self) -> None:
        """Forget weights that were gathered ahead, as soon as they are here."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched.wait()

    def moment(self) -> Moment:
        """Another value after each write into weights; one through a DTensor counts there alone."""
        writes = sum(version_of(tensor) for tensor in (self.main, *self.params))
        return writes, torch.is_inference_mode_enabled()

    @property
    def gathered(self) -> list[object]:
        """What was made of main weights, and can be made again."""
        whole = [] if self.full is self.main else [self.full]
        return [*whole, self._inner, self._part, self._prefetched]

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
        prefetched.wait()
        self._gathered_at = prefetched.moment
        if prefetched.moment == self.moment():
            self.full = self._arrived(prefetched.gather)
        else:
            # Somebody has written main weights since (a hook that clips them, say), or they were
            # gathered inside torch.inference_mode and are used outside of it.
            self._inner = None  # as old

    def _next_gather(self) -> _Gather:
        """Return what this rank gives to an all-gather, and memory for what that brings."""
        if self._part is not None and self._part_at == self.moment():
            assert self.few_ranks is not None
            whole = self.new_whole(self.dtypes.compute)
            return _Gather(whole, self._part, self.few_ranks, of_parts=True)
        if self.packing is None and self.extension is None:
            whole = self.new_whole(self.dtypes.compute)
            return _Gather(whole, self._unshard_outside(whole), self.gather_group)
        sent = self._unshard_outside(None)  # bytes
        whole = sent.new_empty(self.mesh.inner.size() * sent.numel())
        return _Gather(whole, sent, self.gather_group)

    def _arrived(self, gather: _Gather) -> Tensor:
        return gather.whole if gather.of_parts else self._as_weights(gather.whole)

    def _source(self, whole: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        """Return this rank's part of it: the main weights themselves, if they fit.

        Else they are cast where the gather of the group will have them in ``whole``.
        """
        if self.extension is not None:
            param: Any = self.params[0]
            return self.extension.before_gather(local_tensor_of(param))
        if self.packing is not None:
            self.packing.refresh()
            return self.packing.packed
        fits = (self.main.device, self.main.dtype) == (self.device, self.dtypes.compute)
        if fits or whole is None or group is None:
            return self.main.to(self.device, self.dtypes.compute)
        size = self.main.numel()
        return whole.narrow(0, group.rank() * size, size).copy_(self.main)

    def _as_weights(self, whole: Tensor) -> Tensor:
        if self.extension is not None:
            self.extension.after_gather(whole, self.layout.num_ranks)
        if self.packing is None:
            return whole
        full = self.new_whole(self.dtypes.compute)
        self.packing.unpack(whole, full)
        return full

    def _unshard_outside(self, whole: Tensor | None) -> Tensor:
        """Return [I], this rank's part for an all-gather over the inner axis, into ``whole``."""
        if self._inner is not None:
            return self._inner
        if not self.mesh.cuts_outside or self.mesh.outer is None:
            return self._source(whole, self.gather_group)
        source = self._source(None, None)
        if not source.numel():
            return source
        inner = source.new_empty(source.numel() * self.mesh.num_outer)
        all_gather_(inner, source, self.mesh.outer)
        if self.plan.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS:
            self._inner_at = self.moment()
            self._inner = inner  # for the other gathers of the iteration
        return inner

    def reshard(self, *, outside: bool = False, to_few: bool = False) -> None:
        """Drop gathered weights, also those on their way; ``outside``: the outer axis's, too.

        Capture: ``to_few`` is a copy of this rank's part, if few ranks keep them.
        """
        self.drop_prefetched()
        self._part = None
        if to_few and self.few_ranks is not None and self.copy is not None:
            parts = self.copy.view(self.few_ranks.size(), -1)
            self._part, self._part_at = parts[self.few_ranks.rank()].clone(), self._gathered_at
        self.full = None
        if self.extension is not None:
            self.extension.weight = None
        if outside:
            self._inner = None


def version_of(tensor: Tensor) -> int:
    """Return what counts the writes into a tensor, where that is counted."""
    return -1 if tensor.is_inference() else tensor._version


def are_written(copies: Iterable[tuple[Tensor, int]]) -> bool:
    """Tell whether some tensor has been written since it had the version beside it."""
    return any(version_of(whole) != version for whole, version in copies)


def begin_unshard(buffers: Sequence[ShardBuffer], lane: Lane) -> None:
    """Begin to gather the weights of buffers that miss them, those of small ones together.

    Capture: as ``unshard``, which adds a wait; for joined ones see JoinedGather.
    """
    gathers = [(buffer, buffer._begin_gather(lane)) for buffer in buffers]
    for together in joined((each, each[1].whole, each[1].group) for each in gathers):
        whole, sent, group, _ = together[0][1]
        transfer: Transfer | JoinedGather
        begin: Callable[[], None]
        if len(together) == 1:
            transfer = Transfer(whole, sent)
            begin = partial(all_gather_, whole, sent, group, transfer)
        else:
            wholes = [gather.whole for _, gather in together]
            transfer = JoinedGather(wholes, [gather.sent for _, gather in together], group)
            begin = transfer.begin
        with lane.begun():
            begin()
        for buffer, gather in together:
            buffer._prefetched = _Prefetched(gather, transfer, buffer.moment())
