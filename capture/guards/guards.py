"""What must not have changed between two replays."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.modules import (
    hook_places,
    modes,
    structure,
    tables_of,
    tables_of_modules,
    tensor_places,
    users_hooks,
    weights_of,
)
from graphfsdp._capture.guards.moves import Before, Kept, Move, ReadPlaces
from graphfsdp._capture.guards.names import ReadNames
from graphfsdp._capture.guards.places import Asked, Place, Places, differing, hold, in_words, same
from graphfsdp._capture.guards.uses import refuse_deciding
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.trace.source import Ran
from graphfsdp.base.dtensors import local_part
from graphfsdp.base.protocols import units_of
from graphfsdp.errors import Change, ChangeKind, Refuse, raised

# What a pass reduces; when weights are dropped is nothing that a graph depends on.
_HEEDED = ("requires_gradient_sync", "is_last_microbatch", "requires_all_reduce")
_SETTINGS = operator.attrgetter(*_HEEDED)
_LOADED = (
    "load and change the state of an optimizer before the capture; "
    "graphfsdp.optim.FusedAdam loads in place, so its replays go on with what was loaded"
)
_GROUPS = "set up all parameter groups before the capture"

_Group = dict[str, Any]
_State = dict[tuple[int, str], Any]


class Guards:
    """All that a replay takes for granted, compared before each.

    A replay goes on with the memory, the modules, the numbers and the switches that it was
    recorded with, without an error. So each difference has to be found before it runs.

    Attributes:
        moves: What the recorded iteration has moved in Python and decides nothing, once it is
            armed.
        kept: What it has left in Python, once it is armed.
    """

    def __init__(
        self,
        model: nn.Module,
        named_params: Mapping[str, nn.Parameter],
        named_gradients: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        functions: Sequence[Callable[..., Any]],
        device: torch.device,
        ran: Ran,
    ) -> None:
        """Prepare; ``arm`` comes when the iteration has been recorded.

        Args:
            named_params: Those that are trained.
            named_gradients: Returns those of their persistent gradients that the user sees.
            optimizers: Those that step inside the graph.
            functions: The loss function, or the user's iteration.
            ran: The code of a warm-up, to which that of the recording is added.
        """
        self._model = model
        self._named_params = named_params
        self._named_gradients = named_gradients
        self._optimizers = optimizers
        self._device = device
        hooks = users_hooks(tables_of(model, named_params, optimizers))
        self._functions = [*functions, *hooks]
        self._ran = ran
        self._names = ReadNames(ran)
        self._began: Before | None = None
        self.moves: Sequence[Move] = ()
        self.kept: list[Kept] = []
        self._units = units_of(model)
        self._unit_settings: list[Any] = []  # before the recording
        self._kinds: list[Places | ReadPlaces] = []
        self._read: ReadPlaces | None = None
        self._asked = Asked(())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter while the iteration is recorded."""
        self._unit_settings = settings_of(self._units)
        self._began = Before(self._walk())  # the walk holds tensors that the iteration may let go
        yield

    def arm(self, was_read: Callable[[Tensor], bool], refuse: Refuse = raised) -> None:
        """Remember everything as it is now; refuse what decides and the recording has moved.

        Args:
            was_read: Tells whether the recording has touched a tensor's storage.
            refuse: Raises what it is given, or notes it.
        """
        before = self._began
        assert before is not None
        found = self._walk()
        self.kept = before.left(found)
        self.moves = refuse_deciding(before.moves_to(found), self._ran, found.places, refuse)
        # No method of this: what a dropped step holds is to be freed without the collector.
        take = partial(Walk, self._names, self._model, self._functions)
        self._read = ReadPlaces(take, found, before, was_read)
        modules = list(self._model.named_modules())
        read_tensors = [each for each in self._read.named_tensors() if was_read(each[1])]
        tensors = [*self._named_tensors(), *read_tensors]
        gradients = [(f"gradient of {name!r}", view) for name, view in self._named_gradients()]
        hooks = list(tables_of(self._model, self._named_params, self._optimizers))
        # Modules and tensors that the iteration reads beside the model: a frozen teacher, a
        # criterion with class weights.
        outside = found.outside(self._model)
        moded = [each for each in outside if found.reads_mode(each[1])]
        weights = [each for each in weights_of(outside) if was_read(each[1])]
        names = {id(param): name for name, param in self._named_params.items()}
        optimizers = self._optimizers
        self._kinds = [
            Places(partial(structure, modules)),
            Places(partial(tensor_places, tensors)),
            Places(partial(tensor_places, gradients, addresses_only=True)),
            Places(partial(modes, modules)),
            Places(partial(hook_places, hooks)),
            Places(partial(structure, outside), _beside),
            Places(partial(modes, moded), _beside),
            Places(partial(hook_places, list(tables_of_modules(outside))), _beside),
            Places(partial(tensor_places, weights), _beside),
            self._read,
            Places(partial(switches, self._device.type)),
            Places(partial(unit_settings, self._units, self._unit_settings)),
            *(Places(partial(optimizer_places, each, names)) for each in optimizers),
        ]
        self._ask()

    def changes(self) -> list[Change]:
        """Return what has changed since ``arm``; fast where nothing has.

        Capture: never inside one; no host sync.
        """
        if self._asked.hold():
            return []
        doubted = [kind for kind in self._kinds if not hold(kind.asks)]
        found = [change for kind in doubted for change in kind.changes()]
        if not found:
            self._ask()
        return list(dict.fromkeys(found))

    def let_go_of_moves(self) -> None:
        """Ask no more for what an iteration has just moved, as counters now and then.

        CaptureError names what has more following from it.
        """
        if self._asked.hold() or self._read is None:
            return
        refuse_deciding(self._read.let_go_of_moves(), self._ran, self._walk().places)
        self._ask()

    def stands_still(self) -> list[str]:
        """Return, once, what the recording has moved and has asked the system, in words.

        From now on it is not put back any more.
        """
        told = [*map(str, self.moves), *self._ran.asked]
        self._began = None
        self._ran.asked.clear()
        return told

    def python(self) -> Before:
        """Return Python as it is now."""
        return Before(self._walk())

    def moved(self, before: Before) -> list[Move]:
        """Return what has moved in Python since then, tensors as well."""
        return before.moves_to(self._walk(), but_for_tensors=False)

    def put_back(self) -> None:
        """Put back what has moved in Python since the recording began."""
        if self._began is not None:
            self._began.put_back(self._walk())

    def close(self) -> None:
        """Let go of everything."""
        self._kinds, self._read, self._asked = [], None, Asked(())
        self._began = None
        self.kept = []

    def _walk(self) -> Walk:
        return Walk(self._names, self._model, self._functions)

    def _ask(self) -> None:
        self._asked = Asked(ask for kind in self._kinds for ask in kind.asks)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"parameter {name!r}", p) for name, p in self._named_params.items())
        yield from ((f"parameter {name!r}", p) for name, p in self._model.named_parameters())
        yield from ((f"buffer {name!r}", b) for name, b in self._model.named_buffers())


def _beside(change: Change) -> Change:
    # It has no part in what the model's own modules decide: which gradients there are, and in which
    # mode an evaluation runs.
    return replace(change, kind=ChangeKind.ATTRIBUTE, name=f"{change.name} outside of the model")


def switches(device_type: str) -> Iterator[Place]:
    """Yield the switches of torch that an eager iteration would heed and a replay does not.

    Not guarded is what an iteration does not depend on: grad mode around the call (the iteration
    enables gradients by itself), anomaly detection, the number of threads, profilers.
    """
    for name, get in _switches(device_type).items():
        yield Place(name, (operator.call, get), get(), _switch_changes)


def unit_settings(units: Sequence[Any], before: Sequence[Any]) -> Iterator[Place]:
    """Yield what is said to sharded units, by ``set_requires_gradient_sync`` for one.

    What the iteration itself says is in the graph: ``before`` is how they were when the recording
    began; see ``settings_of``.
    """
    for unit, known in zip(units, before, strict=True):
        name = f"unit {unit.name or '(root)'!r}"
        yield Place(name, (_SETTINGS, unit), known, _unit_changes)


def settings_of(units: Iterable[Any]) -> list[tuple[bool, ...]]:
    return list(map(_SETTINGS, units))


def _switches(device_type: str) -> dict[str, Callable[[], Any]]:
    """Return functions that read them; nearly each is one call into torch."""
    core = torch._C
    found: dict[str, Callable[[], Any]] = {
        f"autocast on {device_type}": partial(torch.is_autocast_enabled, device_type),
        f"autocast's dtype on {device_type}": lambda: (
            torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        ),
        "the default dtype": torch.get_default_dtype,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "torch.default_generator": partial(getattr, torch, "default_generator"),
        "flash attention": core._get_flash_sdp_enabled,
        "memory-efficient attention": core._get_mem_efficient_sdp_enabled,
        "math attention": core._get_math_sdp_enabled,
        "MKL-DNN": core._get_mkldnn_enabled,
    }
    backend = "cuda" if device_type == "cuda" else "mkldnn"
    for kind in ("matmul", "conv", "rnn"):
        # The older getters raise when a user has set the precision by the newer names.
        name = f"the float32 precision of {backend} {kind}"
        found[name] = partial(core._get_fp32_precision_getter, backend, kind)
    if device_type == "cuda":
        found |= {
            "cuDNN": core._get_cudnn_enabled,
            "torch.backends.cudnn.benchmark": core._get_cudnn_benchmark,
            "torch.backends.cudnn.deterministic": core._get_cudnn_deterministic,
            "cuDNN attention": core._get_cudnn_sdp_enabled,
            "reduced precision in bfloat16 matmul": (
                core._get_cublas_allow_bf16_reduced_precision_reduction
            ),
            "reduced precision in float16 matmul": (
                core._get_cublas_allow_fp16_reduced_precision_reduction
            ),
            "torch.cuda.default_generators": partial(getattr, torch.cuda, "default_generators"),
        }
    return found


def _plain(value: object) -> object:
    return "ieee" if value == "none" else value  # "none": nothing was ever set


def _switch_changes(name: str, old: object, new: object) -> Iterator[Change]:
    if _plain(old) != _plain(new):
        remedy = f"set {name} before the capture and leave it so, or switch inside loss_fn"
        yield Change(ChangeKind.SETTING, name, *_words(old, new), remedy)


def _unit_changes(title: str, before: Sequence[bool], now: Sequence[bool]) -> Iterator[Change]:
    for name, old, new in zip(_HEEDED, before, now, strict=True):
        if old != new:
            remedy = f"set_{name} as it was, or within iteration="
            yield Change(ChangeKind.SETTING, f"{name} of {title}", *_words(old, new), remedy)


def _words(old: object, new: object) -> tuple[str, str]:
    if isinstance(old, bool) and isinstance(new, bool):
        return ("on" if old else "off", "on" if new else "off")
    return (str(_plain(old) or "off"), str(_plain(new) or "off"))


def optimizer_places(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Place]:
    """Yield what an optimizer in the graph holds.

    After ``load_state_dict`` torch's optimizers hold other tensors: a graph would go on with the
    old ones, and ``state_dict`` would save what no replay has written. ``names``: full names of
    parameters, by id.
    """
    owner, groups, state = type(optimizer).__name__, optimizer.param_groups, optimizer.state
    named: Any = partial(_groups_changes, names)
    yield Place(owner, (getattr, optimizer, "param_groups", None), groups, named, exact=True)
    yield Place(owner, (operator.getitem, (groups,), 0), list(groups), named)
    named = partial(_group_changes, names)
    for index, group in enumerate(groups):
        params, title = group["params"], f"group {index} of {owner}"
        yield Place(title, (dict.get, group, "params", None), params, named, exact=True)
        yield Place(title, (operator.getitem, (params,), 0), list(params), named)
    # In another dict there may be the same; that would have to be watched from then on.
    yield Place("", (getattr, optimizer, "state", None), state, exact=True)
    what = (_state_of, optimizer)
    dicts = [state, *state.values()]
    yield Place("", what, _state_of(optimizer), partial(_state_changes, names), dicts=dicts)
    yield from tensor_places(_named_tensors(state, names), addresses_only=True)


def _state_of(optimizer: torch.optim.Optimizer) -> _State:
    """Return what the state has, by the parameter's id and key; without a key, in which dict."""
    found: _State = {}
    for param, entries in optimizer.state.items():
        found[id(param), ""] = id(entries)
        found |= {(id(param), key): value for key, value in entries.items()}
    return found


def _name_of(number: int, names: Mapping[int, str]) -> str:
    return names.get(number, "a parameter outside of the model")


def _named_tensors(
    state: Mapping[Tensor, Mapping[str, Any]], names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    for param, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"optimizer state {key!r} of {_name_of(id(param), names)!r}", value


def _groups_changes(
    names: Mapping[int, str], owner: str, before: Sequence[_Group], now: Sequence[_Group]
) -> Iterator[Change]:
    if len(now) != len(before):
        words = (f"of {len(before)} groups", f"of {len(now)}")
        yield Change(ChangeKind.GROUPS, f"{owner}.param_groups", *words, _GROUPS)
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        title = f"group {index} of {owner}"
        yield from _group_changes(names, title, old["params"], new["params"])


def _group_changes(
    names: Mapping[int, str], title: str, old: list[Tensor], new: list[Tensor]
) -> Iterator[Change]:
    if list(map(id, old)) != list(map(id, new)):
        words = (_listed(names, old, new), f"{_listed(names, new, old)}, or in another order")
        yield Change(ChangeKind.GROUPS, title, *words, _GROUPS)


def _listed(names: Mapping[int, str], params: list[Tensor], others: list[Tensor]) -> str:
    known = set(map(id, others))
    own = [names.get(id(param), "an unknown one") for param in params if id(param) not in known]
    return f"of {len(params)} parameters" + (f" (with {', '.join(own[:3])})" if own else "")


def _state_changes(
    names: Mapping[int, str], title: str, before: _State, now: _State
) -> Iterator[Change]:
    for (number, key), *values in differing(before, now):
        old, new = (local_part(each) if isinstance(each, Tensor) else each for each in values)
        # The same memory is there after loading what state_dict returned.
        if key and not same(old, new):
            title = f"optimizer state {key!r} of {_name_of(number, names)!r}"
            yield Change(ChangeKind.OPTIMIZER_STATE, title, *in_words(old, new), _LOADED)
