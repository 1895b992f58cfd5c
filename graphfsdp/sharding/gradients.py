"""The gradients of one flat buffer, from whole ones of a backward pass to what ranks have reduced.

Shapes are those of buffer.py: [B] whole, [I] this rank's over the inner axis, [S] main grads.

Note [Gradients of shards]: gradients of a unit's weights come whole, from an autograd function of
its own, and are reduced into the main grads; autograd never accumulates into the sharded parameter.
So its hooks of gradients are called here, once ranks have reduced: those of ``register_hook`` with
what is about to be added, then, when ``.grad`` is bound, those that torch calls behind that. A
gradient that reaches the parameter on another way would be overwritten, and is an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from graphfsdp.base.collectives import Transfer, all_reduce_, reduce_scatter_
from graphfsdp.base.joined import JoinedReduceScatter, joined
from graphfsdp.base.memory import copy_all, zeros_flat
from graphfsdp.base.streams import Lane
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.layout import BufferLayout, BufferPlan, Slot
from graphfsdp.sharding.mesh import UnitMesh

_Hooks = Mapping[int, Callable[..., Tensor | None]]


class How(NamedTuple):
    """How gradients are reduced.

    ``accumulate``: main grads hold something that must stay. Without ``outside`` gradients are
    reduced over the inner axis alone, and wait for a reduction with it. ``reduction``: to the mean
    or sum of the ranks' gradients; with a ``divisor`` to the sum divided by it. ``hooks`` get what
    all ranks have reduced, [S], before it is added, and may change it.
    """

    accumulate: bool
    outside: bool
    reduction: str
    divisor: float | None
    hooks: "Callable[[Gradients, Tensor], None] | None"

    @property
    def collective(self) -> str:
        return self.reduction if self.divisor is None else "sum"


class _Reducing(NamedTuple):
    """A reduction that has begun, over the inner axis (``inside``) or the outer one."""

    how: How
    lane: Lane | None
    transfer: Transfer | JoinedReduceScatter | None  # None where it was waited for at once
    reduced: Tensor
    target: Tensor  # where that belongs
    adds: bool  # onto it, or over it
    inside: bool


class Memory(NamedTuple):
    """Where something lies; pinned is page-locked, for fast copies to a GPU."""

    device: torch.device
    pinned: bool


class BufferMemory:
    """Where one BufferPlan lies on this rank.

    ``device`` is where the unit computes; main weights and main grads are in the CPU's memory if an
    ``offload`` policy says so.
    """

    def __init__(
        self,
        plan: BufferPlan,
        mesh: UnitMesh,
        device: torch.device,
        offload: CPUOffloadPolicy | None,
    ) -> None:
        self.device = device
        self.plan = plan
        self.layout = plan.layout
        self.dtypes = plan.dtypes
        self.sharded = plan.sharded
        self.mesh = mesh
        self.offload = offload

    def new_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
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


class Gradients:
    """The gradients of one buffer: whole until all ranks have reduced them into its main grads.

    ``accumulate`` means everywhere that the main grads hold something that must stay; they may be
    in the memory of the CPU. ``landed``: indices of slots that got a gradient since main grads were
    bound to parameters.
    """

    def __init__(self, buffer: BufferMemory) -> None:
        self.main = buffer.new_zeros(buffer.plan.main_numel, buffer.dtypes.grad)
        self.landed: set[int] = set()
        self._buffer, self._mesh = buffer, buffer.mesh
        self._gaps = list(_gaps(buffer.layout))
        self._comm_dtype = buffer.dtypes.comm
        self._sharded = buffer.sharded
        self._partial: Tensor | None = None  # [I] reduced over the inner axis, not the outer one
        self._full: Tensor | None = None  # [B] not yet reduced
        self._written: set[int] = set()  # slots of it that hold something, by index
        self._added_by_layer: set[int] = set()  # of these, in this backward pass
        self._reducing: _Reducing | None = None
        self._undefined: list[Tensor] = []  # padding of [B], until gradients are copied
        self._zero: Tensor | None = None  # as long as the largest stretch of it

    @property
    def device(self) -> torch.device:
        """Where gradients are computed."""
        return self._buffer.device

    @property
    def is_pending(self) -> bool:
        return self._full is not None or self._partial is not None

    def forget(self) -> None:
        self._full = None
        self._undefined = []
        self._partial = None
        self._written.clear()
        self._added_by_layer.clear()
        self.landed.clear()

    @property
    def _comm_is_main(self) -> bool:
        return (self._comm_dtype, self.device) == (self.main.dtype, self.main.device)

    def add(self, grads: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Add one backward pass's gradients, each whole, in slot order.

        What autograd has for a weight to whose gradient its layer has added (``view``) is a dummy.

        Capture: the copies of `copy_all` or one add per gradient, into a buffer from the graph's
            pool; where nothing is sharded, into the main grads themselves.
        """
        targets, sources = [], []
        for slot, grad in zip(self._buffer.layout.slots, grads, strict=True):
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
        gaps, zeros = self._zeros()
        copy_all([*targets, *gaps], [*sources, *zeros])

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
            is_free = not accumulate and self._partial is None
            if not self._sharded and is_free and self._comm_is_main:
                self._full = self.main
            else:
                full = self._full = self._buffer.new_whole(self._comm_dtype)
                # Padding is reduced too: whatever lay there must not become a NaN.
                self._undefined = [full.narrow(0, *gap) for gap in self._gaps]
        return shaped(self._full.narrow(0, slot.offset, slot.numel), slot)

    def _zeros(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return padding that is undefined, and zeros for it.

        Copied together with gradients, for which torch has one kernel, they cost no other.
        """
        gaps, self._undefined = self._undefined, []
        if not gaps:
            return [], []
        if self._zero is None:
            largest = max(length for _, length in self._gaps)
            dtype = self._buffer.dtypes.compute
            self._zero = torch.zeros(largest, dtype=dtype, device=gaps[0].device)
        return gaps, [self._zero.narrow(0, 0, gap.numel()) for gap in gaps]

    def begin_reduce(self, lane: Lane | None, how: How) -> None:
        """Begin to reduce over all ranks, where there is something to; ``end_reduce`` follows.

        Without a lane, each collective is waited for at once.

        Capture: one collective; the first of an iteration writes straight into the main grads. With
            an outer axis one more for its last microbatch, which ``end_reduce`` begins. A lane adds
            a wait to each.
        """
        full = self.take_whole()
        if full is not None and full.numel():
            self._begin_inside(full, lane, how)
        elif how.outside:
            self._begin_outside(lane, how)

    @property
    def joinable(self) -> Tensor | None:
        """What may be reduced together with that of others: [B], where one reduction is all.

        On a CPU alone: on a GPU gradients land in what is reduced, which a copy would undo.
        """
        alone = not self._sharded or self._mesh.outer is not None or self.device.type != "cpu"
        return None if alone or self._full is None or not self._full.numel() else self._full

    def peers(self, how: How) -> tuple[dist.ProcessGroup, str]:
        return self._mesh.inner, how.collective

    def expect(self, part: Tensor, transfer: JoinedReduceScatter, lane: Lane, how: How) -> None:
        """Take note that this rank's part [S] of what was joinable will come with others."""
        self._reducing = _Reducing(
            how, lane, transfer, part, self.main, adds=how.accumulate, inside=True
        )

    def take_whole(self) -> Tensor | None:
        """Return [B] gradients, or None; they are the caller's from now on."""
        full, self._full = self._full, None
        copy_all(*self._zeros())  # where layers have added all gradients themselves
        self._written.clear()
        return full

    def end_reduce(self) -> None:
        """Wait for what has begun, and bring it to the main grads, over the outer axis as well."""
        reducing = self._land()
        if reducing is None or not reducing.inside or self._mesh.outer is None:
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
        if self._mesh.outer is None:
            target, adds = self.main, how.accumulate and full is not self.main
        elif target is None:
            # Main grads that hold something must not be reduced over the outer axis again.
            target = self.main
            cuts_outside = self._sharded and self._mesh.cuts_outside
            if how.accumulate or cuts_outside or self.main.device != self.device:
                parts = self._mesh.inner.size() if self._sharded else 1
                target = full.new_empty(full.numel() // parts, dtype=self.main.dtype)
        assert target is not None
        reduced = full
        if self._sharded:
            straight = not adds and self._comm_is_main
            reduced = target if straight else full.new_empty(target.numel())
        transfer = _issue(lane, reduced, full, self._mesh.inner, how.collective)
        self._reducing = _Reducing(how, lane, transfer, reduced, target, adds, inside=True)

    def _begin_outside(self, lane: Lane | None, how: How) -> None:
        """Reduce what waits for it over the outer axis into the main grads."""
        if self._mesh.outer is None or self._partial is None:
            return
        partial, self._partial = self._partial, None
        adds = how.accumulate and partial is not self.main
        sent = reduced = partial.to(self._comm_dtype)  # the same tensor if they agree
        if self._sharded and self._mesh.cuts_outside:
            straight = not adds and self._comm_is_main
            reduced = self.main if straight else sent.new_empty(self.main.numel())
        transfer = _issue(lane, reduced, sent, self._mesh.outer, how.collective)
        self._reducing = _Reducing(how, lane, transfer, reduced, self.main, adds, inside=False)

    def _land(self) -> _Reducing | None:
        """Put what has been reduced where it belongs, and return it; None if there is nothing."""
        reducing, self._reducing = self._reducing, None
        if reducing is None:
            return None
        if reducing.transfer is not None:
            reducing.transfer.wait()
        reduced, target, how = reducing.reduced, reducing.target, reducing.how
        if reducing.inside and how.divisor is not None:
            reduced.div_(how.divisor)
        elif reducing.inside and how.reduction == "mean" and self._mesh.experts is not None:
            reduced.mul_(1 / self._mesh.experts.size())
        if how.hooks is not None and (self._mesh.outer is None or not reducing.inside):
            reduced = reduced.to(target.device, target.dtype)
            how.hooks(self, reduced)
        if reducing.adds:
            target.add_(reduced.to(target.device))
        elif reduced is not target:
            target.copy_(reduced)
        return reducing


def begin_reductions(entries: Iterable[tuple[Gradients, How]], lane: Lane) -> None:
    """Begin to reduce the gradients of several buffers, those of small ones together.

    Capture: as ``Gradients.begin_reduce``; of joined ones see JoinedReduceScatter.
    """
    for together in joined((each, each[0].joinable, each[0].peers(each[1])) for each in entries):
        if len(together) == 1:
            gradients, how = together[0]
            gradients.begin_reduce(lane, how)
        else:
            _begin_together(together, lane)


def _begin_together(entries: Sequence[tuple[Gradients, How]], lane: Lane) -> None:
    group, collective = entries[0][0].peers(entries[0][1])
    wholes = [whole for gradients, _ in entries if (whole := gradients.take_whole()) is not None]
    transfer = JoinedReduceScatter(wholes, group, collective)
    with lane.begun():
        transfer.begin()
    for (gradients, how), part in zip(entries, transfer.parts, strict=True):
        gradients.expect(part, transfer, lane, how)


def shaped(flat: Tensor, slot: Slot, num_rows: int | None = None) -> Tensor:
    """Return a stretch of a buffer as a parameter, or as some of its rows, a view."""
    if not slot.shape:
        return flat.view(())
    rows = flat.view(slot.num_rows if num_rows is None else num_rows, *slot.row_shape)
    return rows.movedim(0, slot.dim) if slot.dim else rows


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


def has_hooks(param: nn.Parameter) -> bool:
    behind: _Hooks = param._post_accumulate_grad_hooks or {}
    ours = sum(isinstance(hook, _PastTheUnit) for hook in behind.values())
    return bool(param._backward_hooks) or len(behind) > ours


def change(param: nn.Parameter, grad: Tensor) -> None:
    """Let hooks of ``register_hook`` change a gradient in place, whatever they return."""
    hooks: _Hooks = param._backward_hooks or {}
    for hook in [*hooks.values()]:
        other = hook(grad)
        if other is not None:
            grad.copy_(other)


def call_when_bound(param: nn.Parameter) -> None:
    """Call hooks of ``register_post_accumulate_grad_hook``; they may step and take it off."""
    hooks: _Hooks = param._post_accumulate_grad_hooks or {}
    for hook in [*hooks.values()]:
        if not isinstance(hook, _PastTheUnit):
            hook(param)


class Reduced(NamedTuple):
    """How a parameter's gradients are reduced: its full name, when last, and by which ranks."""

    name: str
    when: int
    groups: Sequence[dist.ProcessGroup]


def watch_gradient(param: nn.Parameter, reduced: Callable[[], Reduced]) -> None:
    """Refuse gradients that reach a sharded parameter past its unit."""
    hooks = param._post_accumulate_grad_hooks
    if hooks:
        # torch.utils.swap_tensors has brought the list along, but not what makes autograd call it.
        param._post_accumulate_grad_hooks = hooks
    if param.requires_grad and not is_watched(param):
        param.register_post_accumulate_grad_hook(_PastTheUnit(reduced))


def is_watched(param: nn.Parameter) -> bool:
    return watch_of(param) is not None


def watch_of(param: nn.Parameter) -> "_PastTheUnit | None":
    hooks: Mapping[int, object] = param._post_accumulate_grad_hooks or {}
    return next((hook for hook in hooks.values() if isinstance(hook, _PastTheUnit)), None)


def refuse_gradient_hooks(param: nn.Parameter, name: str) -> None:
    if param._post_accumulate_grad_hooks or param._backward_hooks:
        raise ConfigError(
            f"parameter {name!r} has a hook of its gradient (register_hook or "
            "register_post_accumulate_grad_hook), and fully_shard puts another parameter in its "
            "place, whose gradients are shards. Remedy: register the hook after fully_shard"
        )


class _PastTheUnit:
    """A hook that is called only where autograd accumulates into a sharded parameter."""

    def __init__(self, reduced: Callable[[], Reduced]) -> None:
        self.reduced = reduced

    def __call__(self, param: Tensor) -> None:
        raise ConfigError(
            f"a gradient has reached the sharded parameter {self.reduced().name!r} itself, past "
            "the forward pass of its unit: the loss uses model.parameters() (a penalty on weights, "
            "say), and what it adds would be lost, since only gradients from the forward pass are "
            "reduced. Remedy: weight_decay for an L2 penalty; a penalty that the module computes "
            "of its weight in its own forward; or add to .grad between backward() and "
            "optimizer.step()"
        )
