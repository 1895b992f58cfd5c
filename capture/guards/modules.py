"""Guards of modules: which there are, what they hold, their mode, their values and containers."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.guards.asks import (
    CONTAINERS,
    FUNCTIONS,
    Ask,
    Place,
    Places,
    copy_of,
    is_plain,
    same_objects,
)
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp._capture.trace.reach import MISSING, OWN
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.torch_internals import children_of

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
# What torch's own layers keep for their repr: the forward pass takes it from the weights.
_UNUSED_BY_TORCH = frozenset(
    {
        *("in_features", "out_features", "in1_features", "in2_features", "num_embeddings"),
        *("embedding_dim", "num_features", "in_channels", "out_channels", "affine"),
        "elementwise_affine",
    }
)
_MAX_DEPTH = 4
_MAX_ITEMS = 10_000
NamedModules = Sequence[tuple[str, nn.Module]]
_REMEDY = (
    "hold what changes in a buffer and write into it (fill_, copy_), which replays see; keep what "
    "the forward pass does not read outside of the model"
)


class StructureGuard:
    """Notices modules, parameters and buffers that were added, removed or replaced."""

    def __init__(self, modules: NamedModules) -> None:
        self._before = [
            (path, module, table, kind, dict(getattr(module, table)))
            for path, module in modules
            for table, kind in _TABLES
        ]

    def asks(self) -> Iterator[Ask]:
        """Yield questions for the tables, and for what they hold, in its order."""
        modules = [module for _, module, *_ in self._before]
        names = [table for _, _, table, *_ in self._before]
        live = list(map(getattr, modules, names))
        # Other tables, equal or not, would have to be watched from then on.
        what = (getattr, modules, names, [None] * len(names))
        yield Ask(what, live, exact=True, dicts=list(map(vars, modules)))
        filled = [table for table in live if table]
        items = [table.items() for table in filled]
        yield Ask((list, items), list(map(list, items)), dicts=filled)
        yield Ask((any, [[table for table in live if not table]]), [False], exact=True)

    def changes(self) -> list[Change]:
        """Compare each table of each module and name what has changed."""
        found = []
        for path, module, table, kind, before in self._before:
            now = getattr(module, table)
            for name in dict.fromkeys((*before, *now)):
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if old is not new:
                    found.append(_slot_change(kind, join(path, name), old, new))
        return found or [
            _order_change(path, before, children_of(module))
            for path, module, table, _, before in self._before
            if table == "_modules" and list(before) != list(children_of(module))
        ]


class AttributeGuard:
    """Notices a changed mode, changed values and containers of modules, and other code of theirs.

    Note [Attributes]: a recording has every Python value baked in that the iteration has read.
    Guarded are the numbers, strings, dtypes, devices, generators, and what else is plain, that it
    has read and not assigned (see AttributeLog), functions, tensors that are plain attributes if
    the recording touched them, and the mode of every module. Of an attribute that was read, all
    contents are taken to be read: numbers in lists, dicts and sets, and in objects that are nothing
    but data, such as a model's configuration; not those that the iteration changes itself, nor
    dicts with tensors in them, which are caches. What it has not read, such as ``model.epoch`` of
    a training loop, may change. Where reads cannot be seen, all public values are guarded.
    """

    def __init__(
        self,
        modules: NamedModules,
        log: AttributeLog,
        was_read: Callable[[Tensor], bool],
        before: Mapping[int, tuple[Any, Any]],
        *,
        every_mode: bool = True,
    ) -> None:
        """Remember the values now.

        Args:
            modules: Those of the model, or others.
            log: What the recorded iteration has read and assigned.
            was_read: Tells whether the recording has touched a tensor's storage.
            before: What ``contents`` returned before the recording.
            every_mode: Guard train or eval mode also of what has no part whose mode was read.
        """
        self._modules = modules
        self._types = [type(module) for _, module in self._modules]
        self._modes: dict[str, tuple[dict[str, Any], bool]] = {}
        self.places = Places(_REMEDY)
        self._contents: set[int] = set()  # ids of containers in there

        def is_read(module: nn.Module, name: str, value: object) -> bool:
            if isinstance(value, Tensor):
                return was_read(value)
            return _may_be_read(module, name, log) if is_plain(value) else log.read(module, name)

        for path, module in self._modules:
            table = vars(module)
            for name, value in table.items():
                if name == "training" and not log.assigned(module, name):
                    if every_mode or any(log.read(part, name) for part in module.modules()):
                        self._modes[path] = table, value
                elif name in OWN or log.assigned(module, name):
                    continue
                elif is_read(module, name, value):
                    self._add(join(path, name), table, name, before)
            for name in ("forward", *sorted(log.names_read(module) - OWN - table.keys())):
                title, old = f"attribute {join(path, name)!r}", table.get(name, MISSING)
                self.places.add(Place(title, table, name, old, is_exact=True))
        for cls in dict.fromkeys(self._types):
            self.places.add(Place(f"{cls.__name__}.forward", cls, "forward", cls.forward))
        of_classes = {
            (type(module), name)
            for _, module in self._modules
            for name in log.names_read(module)
            if name not in vars(module) and name not in OWN
        }
        for cls, name in sorted(of_classes, key=str):
            value = getattr(cls, name, MISSING)
            if is_plain(value):
                self.places.add(Place(f"{cls.__name__}.{name}", cls, name, value))

    def asks(self) -> Iterator[Ask]:
        """Yield questions for classes, modes and values."""
        yield Ask((type, [module for _, module in self._modules]), self._types, exact=True)
        holders, modes = [h for h, _ in self._modes.values()], [m for _, m in self._modes.values()]
        yield Ask((operator.itemgetter("training"), holders), modes, dicts=holders)
        yield from self.places.asks(watched=True)

    def changes(self) -> list[Change]:
        """Compare each value and name what has changed."""
        found = list(self._mode_changes())
        for (path, module), known in zip(self._modules, self._types, strict=True):
            if type(module) is not known:
                what = f"the class of {path!r}" if path else "the model's class"
                words = known.__name__, type(module).__name__
                found.append(Change(ChangeKind.ATTRIBUTE, what, *words, _REMEDY))
        return found + self.places.changes()

    def _add(
        self, path: str, holder: dict[str, Any], name: str, before: Mapping[int, tuple[Any, Any]]
    ) -> None:
        value, title = holder[name], f"attribute {path!r}"
        if isinstance(value, Tensor):
            self.places.add(Place(title, holder, name, value, is_exact=True))
            return
        if is_named(value):
            self.places.add(Place(title, holder, name, value))
        for inner, live in _walk(path, value, 0):
            known = before.get(id(live))  # None or other contents: the iteration has changed it
            if known is None or not same_objects(known[1], live):
                continue
            if id(live) not in self._contents:
                self._contents.add(id(live))
                self.places.add(Place(repr(inner), None, None, copy_of(live), live))

    def _mode_changes(self) -> Iterator[Change]:
        changed = {
            path: old
            for path, (holder, old) in self._modes.items()
            if holder.get("training") is not old
        }
        words = {True: "in train mode", False: "in eval mode"}
        for path, old in changed.items():
            if path and path.rpartition(".")[0] in changed:
                continue  # its parent says it for both
            below = f"{path}." if path else ""
            num_below = sum(name != path and name.startswith(below) for name in changed)
            name = f"module {path!r}" if path else "the model"
            if num_below:
                name += f" (with {num_below} modules in it)"
            call = f"{path or 'model'}.{'train' if old else 'eval'}()"
            remedy = f"call {call} before the step (validation in between is fine)"
            yield Change(ChangeKind.MODE, name, words[old], words[not old], remedy)


def join(path: str, name: str) -> str:
    """Return the full name of what a module holds."""
    return f"{path}.{name}" if path else name


def contents(model: nn.Module) -> dict[int, tuple[Any, Any]]:
    """Return every container of data that a model holds, with a copy, by its id."""
    return {
        id(live): (live, copy_of(live))
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in OWN
        for _, live in _walk(name, value, 0)
    }


def _walk(title: str, value: object, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the containers in a value, itself included, that hold data alone."""
    if depth > _MAX_DEPTH:
        return
    live: Any = value if isinstance(value, (*CONTAINERS, tuple)) else _data_of(value)
    if live is None or len(live) > _MAX_ITEMS:
        return
    pairs = list(dict.items(live)) if isinstance(live, dict) else list(enumerate(live))
    if isinstance(live, dict) and any(isinstance(item, Tensor) for _, item in pairs):
        return
    if not isinstance(live, tuple):
        yield title, live
    for key, item in pairs:
        dotted = f"{title}.{key}" if live is not value else f"{title}[{key!r}]"
        yield from _walk(dotted, item, depth + 1)


def _data_of(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object that is nothing but data, such as a configuration."""
    if is_plain(value) or isinstance(value, (nn.Module, Tensor, *FUNCTIONS)):
        return None
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or not attributes:
        return None
    return attributes if all(map(_is_data, attributes.values())) else None


def _is_data(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_data, dict.values(value)))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_data, value))
    return is_plain(value) or isinstance(value, FUNCTIONS)


def is_named(value: object) -> bool:
    """Tell whether another object in place of this one is noticed."""
    is_known = is_plain(value) or isinstance(value, (*FUNCTIONS, *CONTAINERS, tuple))
    return is_known or _data_of(value) is not None


def _may_be_read(module: nn.Module, name: str, log: AttributeLog) -> bool:
    if log.sees_all or log.read(module, name):
        return log.read(module, name)
    if type(module).__module__.startswith("torch.nn.") and name in _UNUSED_BY_TORCH:
        return False
    return not name.startswith("_")


def _slot_change(kind: str, path: str, old: Any, new: Any) -> Change:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        remedy = "write into the old one (copy_, load_state_dict without assign=True)"
        words = "one tensor", "another one, in other memory"
    else:
        remedy = f"change the {kind}s of a model before its capture"
        words = _kind_of(old), _kind_of(new)
        if isinstance(new, nn.Module) and type(new) is type(old):
            words = f"a {_head_of(old)}", f"another object, a {_head_of(new)}"
            remedy += "; give this one other weights in place (load_state_dict, copy_)"
    return Change(ChangeKind.STRUCTURE, f"{kind} {path!r}", *words, remedy)


def _order_change(path: str, before: Iterable[str], now: Iterable[str]) -> Change:
    title = f"the order of the modules in {path!r}" if path else "the module order"
    words = ", ".join(list(before)[:8]), ", ".join(list(now)[:8])
    return Change(ChangeKind.STRUCTURE, title, *words, "order modules before the capture")


def _head_of(module: nn.Module) -> str:
    """Return a module's class and settings, as it prints them."""
    return f"{type(module).__name__}({module.extra_repr()})"


def _kind_of(value: object) -> str:
    if value is MISSING:
        return "absent"
    return "None" if value is None else f"a {type(value).__name__}"
