"""Gradients that are views of persistent flat buffers, whatever autograd hands out."""

import enum
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from graphfsdp.base.dtensors import RankGroups, local_part, sharding_groups, wrap_like
from graphfsdp.base.memory import FlatBuffer, copy_all
from graphfsdp.base.norms import HeldByGroups, by_groups
from graphfsdp.base.op_tensors import in_same_memory
from graphfsdp.base.protocols import MainGrad
from graphfsdp.errors import CaptureError

# Gradients that wait to be copied together take memory beside their buffers, this much at most:
# small ones until a backward pass is over, larger ones apart from them until it is reached.
_SMALL_BYTES = 256 << 10
_WAITING_BYTES = 16 << 20


class Binding(enum.Enum):
    """Where the optimizer finds a persistent gradient."""

    GRAD = "grad"  # param.grad, in the parameter's dtype
    WIDENED_GRAD = "widened_grad"  # param.grad, in another dtype than the parameter's
    DECOUPLED_GRAD = "decoupled_grad"  # param.decoupled_grad, in any dtype


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Entry:
    """One parameter, its persistent view, and whether this iteration has written it.

    Attributes:
        shows_look: The user sees a look at the view, and never the view itself.
        num_holders: Of the look, if the user has not kept it.
    """

    name: str
    param: nn.Parameter
    view: Tensor
    binding: Binding
    sharding: MainGrad | None = None
    landed: bool = False
    binds_at_once: bool = False
    room: "_WaitingRoom | None" = None
    look: Tensor | None = None
    num_holders: int = 0
    shows_look: bool = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.shows_look = type(self.view) is Tensor and self.binding is not Binding.DECOUPLED_GRAD
        self.address = self.view.data_ptr() if self.shows_look else 0

    @property
    def groups(self) -> RankGroups:
        """The ranks that hold the other parts of the gradient; none if it is whole here."""
        return sharding_groups(self.view) if self.sharding is None else self.sharding.groups

    @property
    def bound(self) -> bool:
        return self.shown is self.view

    @property
    def shown(self) -> Tensor | None:
        is_decoupled = self.binding is Binding.DECOUPLED_GRAD
        return _decoupled_grad(self.param) if is_decoupled else self.param.grad

    def arrive(self, param: Tensor) -> None:
        """Land what autograd has just accumulated, or have it wait to land with others.

        Until it does, ``param.grad`` is what it would be without us, for whoever looks at it.
        """
        room, grad = self.room, param.grad
        if room is None or grad is None or not room.takes(self, grad):
            self.land(param)
            return
        room.add(self, grad)
        if self.binding is not Binding.GRAD:
            param.grad = None

    def land(self, param: Tensor) -> None:
        """Move what autograd has just accumulated into the persistent view.

        The first gradient of an iteration overwrites the view, so nothing is ever zeroed.

        Capture: one copy or add, on the stream that autograd accumulates on; no allocation of ours.
        """
        grad = param.grad
        if grad is self.view or grad is None:
            return  # a later microbatch: AccumulateGrad added to the bound view in place
        if grad.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {self.name!r} has layout {grad.layout}; a persistent buffer "
                "holds strided gradients only. Remedy: build the module without sparse "
                "gradients (nn.Embedding(..., sparse=False))"
            )
        if grad.requires_grad:  # made with create_graph=True
            grad = grad.detach()
        # Where optimizers step in between, whoever took the gradient off has zeroed it.
        goes_on = self.bound if self.binds_at_once else self.landed
        if goes_on and self.binding is not Binding.GRAD:
            self.view.add_(grad)
        else:
            # Also right when autograd accumulated out of place (create_graph=True): `grad`
            # then holds the view's value plus the new gradient.
            self.view.copy_(grad)
        self.landed = True
        param.grad = self.view if self.binding is Binding.GRAD else None
        if self.binds_at_once:
            self.bind()

    def bind(self) -> None:
        """Put the view where the optimizer and the user look for it."""
        if self.binding is Binding.DECOUPLED_GRAD:
            self.param.decoupled_grad = self.view  # type: ignore[attr-defined]
        else:
            self.param.grad = self.view

    def make_look(self) -> None:
        """Make a look at the view, where there is none; see Note [Kept gradients]."""
        if self.shows_look and not self.is_looking:
            self.look = in_same_memory(self.view)
            self.num_holders = sys.getrefcount(self.look)

    @property
    def is_looking(self) -> bool:
        """Whether there is a look, and the user has not given it other memory."""
        return self.look is not None and self.look.data_ptr() == self.address

    def show(self) -> None:
        """Put the look where the user finds it."""
        self.make_look()
        if self.look is None:
            self.bind()
        else:
            self.param.grad = self.look

    def go_on_as(self, grad: Tensor) -> None:
        """Have what was the gradient before, and was left on, be the look."""
        shown = self.look is not None and self.param.grad is self.look
        if shown and type(grad) is Tensor and grad.dtype is self.view.dtype:
            grad.data = self.view
            self.look = self.param.grad = grad

    def show_again(self) -> bool:
        """Put the look back that nobody has kept; return whether it was there to be put back."""
        look = self.look
        # The name here holds it as well.
        if look is None or sys.getrefcount(look) > self.num_holders + 1:
            return False
        if look.data_ptr() != self.address:
            return False
        self.param.grad = look
        return True

    def part(self) -> None:
        """Give the look memory of its own if the user has kept it and taken it off."""
        if self.look is None or self.param.grad is self.look:
            return
        if sys.getrefcount(self.look) > self.num_holders:
            self.look.data = self.look.clone()
            self.look = None

    def adopt(self) -> None:
        """Move a gradient that the user's iteration has assigned by hand into the view.

        One that he has taken off stays off.

        Capture: one copy; replays leave it where eager iterations do.
        """
        grad = self.shown
        if grad is None or grad is self.view or grad.layout is not torch.strided:
            return
        self.view.copy_(grad.detach())
        self.landed = True
        self.bind()

    def unbind(self) -> None:
        """Take every gradient off the parameter; the view keeps its storage."""
        self.param.grad = None
        if self.binding is Binding.DECOUPLED_GRAD:
            self.param.decoupled_grad = None  # type: ignore[attr-defined]
        self.landed = False


class _WaitingRoom:
    """First gradients on a GPU, until they are copied into their views, many at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: int | None = None
        self._waiting: dict[_Entry, Tensor] = {}
        self._num_bytes = 0

    def begin(self) -> None:
        self._waiting, self._num_bytes = {}, 0
        self._stream = self._current_stream()

    def takes(self, entry: _Entry, grad: Tensor) -> bool:
        """Tell whether it is a first gradient, a plain one, on the iteration's own stream."""
        if entry in self._waiting:
            self.copy()  # another one of the same parameter, in the same backward pass
        hooks: Mapping[int, object] = entry.param._post_accumulate_grad_hooks or {}
        if entry.landed or entry.binds_at_once or len(hooks) > 1:
            return False
        plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad
        return plain and self._current_stream() == self._stream

    def add(self, entry: _Entry, grad: Tensor) -> None:
        self._waiting[entry] = grad
        self._num_bytes += entry.view.nbytes
        if self._num_bytes >= _WAITING_BYTES:
            self.copy()

    def copy(self) -> None:
        """Have all land that wait. Capture: see copy_all."""
        waiting, self._waiting, self._num_bytes = self._waiting, {}, 0
        came = {}
        for entry, grad in waiting.items():
            # Somebody may have put another one there since, or none.
            now = entry.param.grad if entry.binding is Binding.GRAD else grad
            if now is not None:
                came[entry] = now
        with torch.no_grad():
            copy_all([entry.view for entry in came], [*came.values()])
        for entry in came:
            entry.landed = True
            if entry.binding is Binding.GRAD:
                entry.param.grad = entry.view

    def _current_stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)


Landed = list[tuple[nn.Parameter, Tensor, _Entry]]


class PersistentGradients:
    """The gradients of a model as views of one flat buffer per dtype, at fixed addresses.

    Note [Gradient landing]: autograd gives a parameter whose ``.grad`` is None the tensor that
    the backward kernel made ("stealing"). An iteration therefore starts with ``.grad = None``;
    a hook copies each stolen gradient into its view as soon as it exists, and binds the view.
    Later microbatches are added in place by autograd itself. So there is no memset, and at
    most one gradient exists twice at a time. On a GPU, where each copy is a launch, gradients wait
    for others to be copied with, a few MiB of them: those of a compiled region come all at once.

    Note [Kept gradients]: the user may keep what ``.grad`` was, and take it off with ``zero_grad``;
    in a loop without us it then keeps its numbers. So between iterations ``.grad`` is another
    tensor in the view's memory, whose references tell whether he has. If so it gets memory of its
    own before the next iteration writes the view. One that is left on goes on being the gradient.
    """

    def __init__(
        self,
        named_params: Mapping[str, nn.Parameter],
        *,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        use_decoupled_grad: bool,
        sharded: Mapping[nn.Parameter, MainGrad] | None = None,
    ) -> None:
        """Allocate the buffers and hook the parameters, each of which is named once.

        Gradients of ``sharded`` already have persistent buffers: the sharding binds these itself
        after each reduction.
        """
        sharded = sharded or {}
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
        entries: dict[str, _Entry] = {}
        for name, param in named_params.items():
            if param not in sharded:
                groups.setdefault((dtype_of(param), param.device), []).append((name, param))
                continue
            main_grad = sharded[param]
            binding = Binding.DECOUPLED_GRAD if main_grad.decoupled else Binding.GRAD
            entries[name] = _Entry(name, param, main_grad.view, binding, sharding=main_grad)
        self.buffers: list[FlatBuffer] = []
        self._rooms: dict[tuple[torch.device, bool], _WaitingRoom] = {}
        for (dtype, device), members in groups.items():
            parts = [local_part(param) for _, param in members]
            buffer = FlatBuffer(parts, dtype=dtype, device=device)
            self.buffers.append(buffer)
            for (name, param), local_view in zip(members, buffer.views, strict=True):
                view = wrap_like(local_view, param)
                binding = _binding(param, dtype, use_decoupled_grad)
                entries[name] = _Entry(name, param, view, binding)
                if device.type == "cuda" and view is local_view:
                    kind = device, view.nbytes <= _SMALL_BYTES
                    entries[name].room = self._rooms.setdefault(kind, _WaitingRoom(device))
        self._entries = [entries[name] for name in named_params]
        # In the order of the parameters, which is that of every rank's collectives.
        shared = [*(g.groups for g in sharded.values()), *(e.groups for e in self._entries)]
        self._groups = tuple(dict.fromkeys(groups for groups in shared if groups))
        self._decoupled = use_decoupled_grad
        self._landed: Landed | None = None
        self._were_bound = False
        self._handles: list[RemovableHandle] = [
            entry.param.register_post_accumulate_grad_hook(_landing(entry))
            for entry in self._entries
            if entry.sharding is None
        ]

    def begin(self, *, bind_at_once: bool = False) -> None:
        """Start an iteration: whatever was in the gradients is over.

        Capture: Python only; no kernel.
        """
        self._landed = None
        self._were_bound = self._were_bound or bind_at_once
        for entry in self._entries:
            entry.unbind()
            entry.binds_at_once = bind_at_once
        for room in self._rooms.values():
            room.begin()

    def end_backward(self) -> None:
        """Have all gradients land that wait for others. Capture: see copy_all."""
        for room in self._rooms.values():
            room.copy()

    def finish(self) -> None:
        """Bind the view of every parameter that got a gradient in this iteration."""
        self.end_backward()
        self._were_bound = True
        for entry in self._entries:
            if entry.sharding is not None:
                entry.landed = entry.bound  # the reduction has written and bound it, or not
            elif entry.binds_at_once:
                entry.adopt()
            elif entry.landed:
                entry.bind()

    def landed(self) -> Landed:
        """Return what the last iteration has left bound, for replays of it."""
        return [(e.param, e.view, e) for e in self._entries if e.landed and e.bound]

    def rebind(self, landed: Landed) -> None:
        """Bind what a replay is about to write; ``zero_grad`` or another graph has taken it off."""
        if self._landed is not landed:
            reached = {id(entry) for _, _, entry in landed}
            for entry in self._entries:
                if id(entry) not in reached:
                    entry.unbind()
                entry.landed = id(entry) in reached
            self._landed = landed
        grad: Tensor | None = None
        # Runs before every replay, so without a function for each parameter.
        if self._decoupled:
            loose = [e for p, view, e in landed if _decoupled_grad(p) is not view]
        else:
            loose = [
                e
                for p, view, e in landed
                if (grad := p.grad) is None
                or grad is not (e.look if e.shows_look else view)
                or (e.look is not None and e.look.data_ptr() != e.address)
            ]
        grad = None  # a name that holds a look would pass for the user's
        for entry in loose:
            if not entry.show_again():
                entry.part()
                entry.show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Run an iteration that is no replay; see Note [Kept gradients]."""
        firsts = []
        for entry in self._entries:
            entry.part()
            if entry.look is None and entry.param.grad is not None:
                firsts.append((entry, entry.param.grad))
            entry.make_look()  # now: nothing may fail behind the iteration
        yield
        for entry in self._entries:
            if entry.bound:
                entry.show()
        for entry, grad in firsts:
            entry.go_on_as(grad)

    def drop(self) -> None:
        """Unbind what a failed replay may have half written; the next replay binds it again."""
        for entry in self._entries:
            landed = entry.landed
            entry.unbind()
            entry.landed = landed

    def unseen(self) -> list[Tensor]:
        """Return the buffers of ours if no iteration has shown anybody its gradients yet."""
        return [] if self._were_bound else [buffer.flat for buffer in self.buffers]

    def storages(self) -> list[Tensor]:
        """Return plain tensors that look at all memory of the persistent gradients."""
        views = [local_part(e.view) for e in self._entries if e.sharding is not None]
        return [*(buffer.flat for buffer in self.buffers), *views]

    def landed_views(self) -> HeldByGroups:
        """Return this rank's part of what the last iteration wrote, as plain tensors.

        Every group is named, also where nothing is here.
        """
        landed = [(e.groups, local_part(e.view)) for e in self._entries if e.landed]
        return by_groups([*((groups, None) for groups in self._groups), *landed])

    def without_gradient(self) -> Sequence[str]:
        return [entry.name for entry in self._entries if not entry.landed]

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        return ((entry.name, entry.view) for entry in self._entries)

    def shown_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield those that the user has in his hands, and could give other memory."""
        return ((entry.name, entry.view) for entry in self._entries if not entry.shows_look)

    def num_hooks(self) -> int:
        """Count what is called behind each gradient, of this step's, of others' and of users'."""
        hooks = (entry.param._post_accumulate_grad_hooks or {} for entry in self._entries)
        return sum(map(len, hooks))

    @property
    def num_bytes(self) -> int:
        """Bytes of the persistent buffers, and of this rank's rows in those of a sharded model."""
        rows = (local_part(e.view) for e in self._entries if e.sharding is not None)
        return sum(b.num_bytes for b in self.buffers) + sum(r.nbytes for r in rows)

    def save_bindings(self) -> Callable[[], None]:
        """Return a function that puts today's gradients back on the parameters."""
        saved = [
            (entry, entry.param.grad, _decoupled_grad(entry.param), entry.landed)
            for entry in self._entries
        ]

        def restore() -> None:
            self._landed = None
            for room in self._rooms.values():
                room.begin()
            for entry, grad, decoupled_grad, landed in saved:
                entry.param.grad = grad
                if entry.binding is Binding.DECOUPLED_GRAD:
                    entry.param.decoupled_grad = decoupled_grad  # type: ignore[attr-defined]
                entry.landed = landed

        return restore

    def close(self) -> None:
        """Unhook the parameters. Bound gradients stay, and keep their buffer alive."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _decoupled_grad(param: nn.Parameter) -> Tensor | None:
    return getattr(param, "decoupled_grad", None)


def _landing(entry: _Entry) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the entry alive.

    The entry holds the parameter: torch cannot collect a cycle through a parameter's hooks, so
    a step that is dropped without being closed would never free the model.
    """
    reference = weakref.ref(entry)

    def land(param: Tensor) -> None:
        target = reference()
        if target is not None:
            target.arrive(param)

    return land


def _binding(param: nn.Parameter, dtype: torch.dtype, use_decoupled_grad: bool) -> Binding:
    if use_decoupled_grad:
        return Binding.DECOUPLED_GRAD
    if dtype == param.dtype:
        return Binding.GRAD
    # None lifts autograd's demand that .grad has the parameter's dtype: autograd goes on
    # producing its own dtype, and the landing copy widens it.
    param.grad_dtype = None
    return Binding.WIDENED_GRAD
