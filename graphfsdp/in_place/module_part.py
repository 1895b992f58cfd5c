"""A module of a loop whose calls are replayed: what it takes until then, and when it is not so."""

import enum
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrize

from graphfsdp._capture.rules.constants import ConstantWatch
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp._capture.trees import flatten
from graphfsdp._capture.undo.host_state import generators_of, save_random_states
from graphfsdp.base.memory import available_bytes
from graphfsdp.base.torch_internals import (
    COMPILED_CALL,
    TreeSpec,
    backward_id,
    caller_of_compiled_call,
    functorch_level,
    hooks_on_saved,
    num_dispatch_modes,
    num_function_modes,
    tracing_state,
)
from graphfsdp.errors import CaptureError, Hazard, HazardKind
from graphfsdp.in_place.casts import casts_behind
from graphfsdp.in_place.part_graphs import AsWritten, Kind, PartGraphs, tensors_of, told_by
from graphfsdp.in_place.part_recording import NotAPartError, guards_of, has_own_memory

_LOG = logging.getLogger("graphfsdp")
_NUM_WARM_UPS = 2
_MOST_UNSETTLED = 3  # warm-ups that did what the one before did not, and recordings that failed
_MOST_KINDS = 16  # of calls, by shapes and numbers
_MOST_SLOTS = 4  # calls that are under way at the same time
_ROOM = 4  # times what a recording has taken must be free for another one
_MOST_ANEW = 4  # recordings that changes of the model have ended
_MOST_REFUSED = 32  # calls in a row that no graph holds
SLOW = "it does not pay:"
_READ = "aten._local_scalar_dense.default"  # of a value, which other numbers may come of
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class PartState(enum.Enum):
    """What a module's next call does; the value is for people."""

    WARMUP = "warming up"
    TRIAL = "timed beside its eager self"
    CAPTURED = "captured"
    AS_WRITTEN = "as written"


class ModulePart:
    """One module, called by the loop or by a module that runs as it is written.

    It is asked in place of the module's own call, and copied along with what else is in a module's
    ``__dict__``, by code that copies modules by itself: in a copy in depth None stands in its
    place, and whoever shares it is not the part.

    Attributes:
        name: Its full name, for messages.
        state: What its next call does.
        is_on: Its graphs are replayed, where there are any; else it runs as written.
        why: Why it runs as written; "" where it does not.
        hazards: What of its calls no graph holds.
        num_calls: Calls of the loop.
        num_replays: Calls that were replayed.
        close_loop: Has the whole loop that it is part of run as written.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        backend: GraphBackend,
        *,
        keeps_all: bool,
        on_end: Callable[["ModulePart"], None],
        close_loop: Callable[[], None],
    ) -> None:
        """``on_end`` is called when the module runs as written from now on."""
        self.name = name
        self.module = module
        self.close_loop = close_loop
        self.state = PartState.WARMUP
        self.is_on = False
        self.why = ""
        self.hazards: list[Hazard] = []
        self.num_calls = 0
        self.num_replays = 0
        self._keeps_all = keeps_all
        self._on_end = on_end
        self._num_warmed_up = self._num_recorded = 0  # calls, the latter of forward passes
        self._backend = backend
        self._device_type = backend.device.type
        self._kinds: dict[Any, Kind] = {}
        self._num_anew = 0
        self._num_refused = 0  # calls in a row
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = caller_of_compiled_call()
        if module is not self.module:
            return module._call_impl(*args, **kwargs)
        return self._call(args, kwargs)

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def _slots(self) -> list[PartGraphs]:
        return [slot for kind in self._kinds.values() for slot in kind.slots]

    @property
    def num_nodes(self) -> int:
        """Nodes of all forward graphs."""
        return sum(slot.num_nodes or 0 for slot in self._slots)

    @property
    def num_captures(self) -> int:
        """Passes that took longer than others, since they warmed up or were recorded."""
        num_backward = sum(len(slot.passes()) for slot in self._slots)
        return self._num_warmed_up + self._num_recorded + num_backward

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        written: Callable[..., Any] = self.module._call_impl
        if self.state is PartState.AS_WRITTEN or not self._is_ordinary():
            return written(*args, **kwargs)
        leaves, spec = self._flat(args, kwargs)
        key = self._key(leaves, spec)
        kind = None if key is None else self._kinds.get(key)
        if kind is None and key is not None and len(self._kinds) < _MOST_KINDS:
            kind = self._kinds[key] = Kind(is_refused=not all(map(_is_held, leaves)))
        if kind is None or kind.is_refused:
            self._count_refused(leaves)
            return written(*args, **kwargs)
        self._num_refused = 0
        if kind.num_seen < _NUM_WARM_UPS:
            return self._warm_up(kind, leaves, args, kwargs)
        if kind.slots and not self.is_on:
            return written(*args, **kwargs)
        return self._replay(kind, leaves, spec, args, kwargs)

    def _count_refused(self, leaves: Sequence[Any]) -> None:
        """Give up once so many calls in a row were looked at for nothing."""
        self._num_refused += 1
        if self._num_refused < _MOST_REFUSED:
            return
        for leaf in leaves:
            if not (type(leaf) is Tensor or isinstance(leaf, _PLAIN)):
                # The modules in it may well be given tensors.
                self.leave(f"it is given a {type(leaf).__name__}, which no graph can be given")
                return
        self.leave(f"{SLOW} no graph holds any of its last {_MOST_REFUSED} calls")

    def has_graph_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether such a call would be a replay if there were no mode that only looks on."""
        leaves, spec = self._flat(args, kwargs)
        kind = self._kinds.get(self._key(leaves, spec))
        has_graph = kind is not None and bool(kind.slots) and not kind.is_refused
        return self.is_on and has_graph and self._is_ordinary(num_watching=1)

    @property
    def goes_back_eagerly(self) -> bool:
        """Whether no graph holds a backward pass of its graphs."""
        return any(None in slot.passes() for slot in self._slots)

    def _is_ordinary(self, num_watching: int = 0) -> bool:
        """Tell whether the call is one of a loop, and no transform, hook or mode has part in it."""
        return (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and functorch_level() is None
            and backward_id() == -1  # e.g. recomputation
            and num_dispatch_modes() == num_watching
            and not num_function_modes()
            and hooks_on_saved(True) is None
            and forward_ad._current_level < 0
            and not torch.is_anomaly_enabled()
            and not parametrize._cache_enabled  # what is made of weights, for all who ask for it
            and not torch.compiler.is_compiling()
            and tracing_state() is None
            and threading.get_ident() == self._thread
        )

    def _flat(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], TreeSpec | None]:
        """Return all leaves and how they are nested; None where the leaves are the arguments."""
        if not kwargs and all(type(arg) is Tensor or arg is None for arg in args):
            return args, None
        return flatten((args, kwargs))

    def _key(self, leaves: Sequence[Any], spec: TreeSpec | None) -> Any:
        """Return what tells kinds of calls apart; None for a call that no graph can have.

        What somebody has written on a tensor (``x.mask = mask``) is nothing that a graph would see.
        """
        key: list[Any] = [spec, len(leaves), self.module.training]
        seen: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if type(leaf) is Tensor:
                if leaf.layout is not torch.strided or vars(leaf):
                    return None
                first = seen.setdefault(id(leaf), place)
                form = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
                key.append((first, form))
            elif isinstance(leaf, _PLAIN):
                key.append((type(leaf), repr(leaf) if type(leaf) is float else leaf))
            else:
                return None
        if torch.is_autocast_enabled(self._device_type):
            key += [torch.get_autocast_dtype(self._device_type), torch.is_autocast_cache_enabled()]
        return tuple(key)

    def _warm_up(
        self, kind: Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        is_first = not kind.num_seen
        if is_first:
            with self._judging(kind):
                self._look()
                kind.constants = ConstantWatch(self.module, self._backend.device, ())
        if kind.constants is None:
            return self.module._call_impl(*args, **kwargs)
        self._num_warmed_up += 1
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = [*map(_written_on, given)]
        why_not = _settling(self.module, self._backend.device, kind.constants)
        kind.casts()  # where those of a recording are made
        with kind.constants.noting(is_first=is_first, given=given):
            output = self.module._call_impl(*args, **kwargs)
        told, kind.told = kind.told, told_by(output)
        why, hazard = why_not()
        if written != [*map(_written_on, given)]:
            why = "it gives an input a hook or an attribute"
        if not why and not is_first and told != kind.told:
            why = f"it returns {kind.told}, and returned {told} before"
        # Only now: a call that has failed tells nothing of what the next ones are under.
        kind.num_seen += not why
        if why:  # warm up once more: a recording that is given up cannot take all of this back
            kind.num_unsettled += 1
        if kind.num_unsettled > _MOST_UNSETTLED:
            with self._judging(kind):
                raise NotAPartError(why, hazard)

        def look(_: Tensor) -> None:
            if torch.is_grad_enabled():
                self._refuse_second_order(kind)

        tensors = tensors_of(output)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(look)
        if is_first:
            casts = torch.is_autocast_enabled(self._device_type)
            dtype = torch.get_autocast_dtype(self._device_type)
            caches = torch.is_autocast_cache_enabled()
            kind.autocast = torch.autocast(self._device_type, dtype, casts, caches)
            if casts and caches:
                with self._judging(kind):
                    kind.casts = casts_behind(tensors, [*self.module.parameters()], dtype)
        return output

    @contextmanager
    def _judging(self, kind: Kind) -> Iterator[None]:
        """Have such calls run as written if the body tells why no graph holds them."""
        try:
            yield
        except NotAPartError as error:
            own = error.__cause__
            if own is not None and not isinstance(own, CaptureError):  # no fault of a recording's
                kind.num_unsettled += 1
                if kind.num_unsettled <= _MOST_UNSETTLED:
                    return
            kind.is_refused = True
            self.hazards += [] if error.hazard is None else [error.hazard]
            if not self._slots:
                self.leave(str(error))
            else:
                _LOG.info("some calls of %s run as written: %s", self.name, error)

    def _refuse_second_order(self, kind: Kind) -> None:
        """Let such calls run as written: autograd adds up within them what comes of both passes."""
        if not kind.is_refused:
            kind.is_refused = True
            _LOG.info(
                "some calls of %s run as written: the loop goes backward through their backward "
                "pass (create_graph=True)",
                self.name,
            )

    def _look(self) -> None:
        """NotAPartError if something about the module alone tells that it is none."""
        device = self._backend.device
        for name, module in self.module.named_modules():
            where = f"{name!r} in it" if name else "it"
            if isinstance(module, torch.jit.ScriptModule):
                raise NotAPartError(f"{where} is TorchScript")
            for table in _HOOKS:
                if getattr(module, table):
                    raise NotAPartError(f"{where} has a hook ({table.strip('_')})")
        hooked = [
            name
            for name, param in self.module.named_parameters()
            if param._backward_hooks or param._post_accumulate_grad_hooks
        ]
        if len(hooked) > 1:  # whose hooks run as gradients arrive, and those of a part do at once
            raise NotAPartError(f"{hooked[0]!r} and other weights of it have hooks")
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
            if not is_plain or tensor.layout is not torch.strided:
                raise NotAPartError(f"it has a {type(tensor).__name__} of layout {tensor.layout}")
            if tensor.device.type != device.type:
                raise NotAPartError(f"it has a tensor on {tensor.device}")
        if not any(param.requires_grad for param in self.module.parameters()):
            raise NotAPartError("nothing in it is trained")

    def _replay(
        self,
        kind: Kind,
        leaves: Sequence[Any],
        spec: TreeSpec | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        module = self.module
        graphs = next((slot for slot in kind.slots if not slot.is_taken), None)
        if graphs is not None and (changes := graphs.guards.changes()):
            self._begin_anew(str(changes[0]))
            return module._call_impl(*args, **kwargs)
        if graphs is None and len(kind.slots) == _MOST_SLOTS:
            return module._call_impl(*args, **kwargs)
        if graphs is None:
            random = [(g, g.get_state()) for g in generators_of(module, self._backend.device)]
            graphs = self._record(kind, leaves, spec)
            if graphs is None:
                return module._call_impl(*args, **kwargs)
            given = graphs.given(leaves)
            results, graphs.first = graphs.first, []
        else:
            random = [(generator, generator.get_state()) for generator in graphs.draws_from]
            given = graphs.given(leaves)
            replayed = graphs.replay(given)
            if replayed is None:  # the call fails as ever, and leaves what it has done until then
                return module._call_impl(*args, **kwargs)
            results = replayed
            self.num_replays += 1

        def again() -> AsWritten:
            self._refuse_second_order(kind)
            # What it writes are other buffers: autograd would notice it if they were put back.
            buffers = {name: each.clone() for name, each in module.named_buffers()}
            put_back = save_random_states(module, self._backend.device)
            try:
                for generator, state in random:
                    generator.set_state(state)
                with kind.autocast:
                    output = functional_call(module, buffers, args, kwargs)
            finally:
                put_back()
            return tensors_of(output), leaves

        return graphs.hand_out(results, given, again)

    def _record(
        self, kind: Kind, leaves: Sequence[Any], spec: TreeSpec | None
    ) -> PartGraphs | None:
        needed = _ROOM * max((slot.kept_bytes for slot in self._slots), default=0)
        if needed > (room_on(self._backend.device) or math.inf):
            kind.is_refused = True
            _LOG.info("some calls of %s run as written: memory for them is short", self.name)
            return None
        self._num_recorded += 1
        with self._judging(kind):
            graphs = PartGraphs(self.module, self._backend, kind, leaves, spec)
            kind.slots.append(graphs)
            if self.state is PartState.WARMUP:
                self.is_on = self._keeps_all
                self.state = PartState.CAPTURED if self.is_on else PartState.TRIAL
            return graphs
        return None

    def _begin_anew(self, why: str) -> None:
        self._num_anew += 1
        if self._num_anew > _MOST_ANEW:
            self.leave(f"what it reads goes on changing: {why}")
            return
        _LOG.info("%s is recorded anew: %s", self.name, why)
        self._drop()

    def leave(self, why: str) -> None:
        """Run as written from now on."""
        self.why = why
        self.close()
        self._on_end(self)

    def close(self) -> None:
        """Give the module its own call back."""
        self.state, self.is_on = PartState.AS_WRITTEN, False
        self._drop()
        if vars(self.module).get(COMPILED_CALL) is self:
            del vars(self.module)[COMPILED_CALL]

    def _drop(self) -> None:
        for slot in self._slots:
            slot.drop()
        self._kinds.clear()


def _settling(
    module: nn.Module, device: torch.device, constants: ConstantWatch
) -> Callable[[], tuple[str, Hazard | None]]:
    """Look before a warm-up; return what tells whether it did what it did not the time before.

    In words, "" for nothing, and what of it no graph holds. What has been drawn from an iterator,
    read from a file or printed cannot be put back when a recording is given up, nor a tensor in
    whose place an object of the user's has got another. So one is begun only behind a warm-up that
    did nothing of the kind.
    """
    known = constants.log
    guards = guards_of(module, device, constants.ran)  # of the code that the one before has run
    before = None if known is None else guards.python()

    def why_not() -> tuple[str, Hazard | None]:
        now = constants.log
        if before is None or known is None or now is None:
            return "", None
        if moves := guards.moved(before):
            return f"it moves Python: {moves[0]}", None
        if told := constants.ran.told:
            return f"it tells something ({told[0]}), which a replay does not", None
        if any(entry.op == _READ for entry in now.entries):  # a recording names its line
            return "", None
        for found in known.differences(now):
            if found.kind is not HazardKind.STATE:  # memory, which a recording looks at
                return found.hazard.why, found.hazard
        return "", None

    return why_not


def _written_on(tensor: Tensor) -> tuple[int, bool, int]:
    """Return what a call may write on a tensor, where the loop or a later call finds it."""
    return len(tensor._backward_hooks or ()), tensor.retains_grad, len(vars(tensor))


def room_on(device: torch.device) -> int | None:
    """Return the bytes that are free on a device; None where nobody tells."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _is_held(leaf: Any) -> bool:
    """Tell whether there is an input at a fixed address for such a one."""
    return not isinstance(leaf, Tensor) or (not leaf.is_complex() and has_own_memory(leaf))
