"""Guard of what modules hold beside tensors and numbers: containers, configurations, functions."""

import enum
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.modules import OWN, SCALARS, is_scalar, join, same_objects
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp.base.changes import Change, ChangeKind

_MAX_DEPTH = 4
_MAX_ITEMS = 10_000
_CONTAINERS = (list, dict, set)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_GET_FORWARD = operator.attrgetter("forward")
_MISSING = object()
_REMEDY = (
    "hold what changes in a buffer and write into it (fill_, copy_), which replays see; keep what "
    "the forward pass does not read outside of the model"
)


class ValueGuard:
    """Notices changed contents of containers and configuration objects, None, and functions.

    Note [Contents]: of an attribute that the iteration has read, all contents are taken to be
    read: numbers in lists, dicts and sets, and in objects that are nothing but data, such as a
    model's configuration. Not those that the iteration changes itself, nor dicts with tensors in
    them, which are caches. Also guarded are the classes of modules, and their ``forward``. What
    only code of torch.compile reads is not seen here; of that, numbers alone are guarded.
    """

    def __init__(
        self, model: nn.Module, log: AttributeLog, before: Mapping[int, tuple[Any, Any]]
    ) -> None:
        """Remember everything now.

        Args:
            model: The model.
            log: What the recorded iteration has read and assigned.
            before: What ``contents`` returned before the recording.
        """
        self._modules = [module for _, module in model.named_modules()]
        self._types: list[type[nn.Module]] = list(map(type, self._modules))
        self._paths = [path for path, _ in model.named_modules()]
        self._classes = list(dict.fromkeys(self._types))
        self._forwards = [cls.forward for cls in self._classes]
        self._named: list[tuple[str, dict[str, Any], str, Any]] = []
        self._lives: list[Any] = []
        self._copies: list[Any] = []
        self._names: list[str] = []
        self._class_values: list[tuple[type, str, Any]] = []
        self._columns: list[tuple[Any, ...]] = [(), (), (), ()]
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name in OWN or log.assigned(module, name) or not log.read(module, name):
                    continue
                if is_scalar(value):
                    continue  # AttributeGuard has it
                if is_named(value):
                    self._named.append((join(path, name), vars(module), name, value))
                self._add_contents(join(path, name), value, before)
        self._columns = list(zip(*self._named, strict=True)) or self._columns
        classes: set[tuple[type, str]] = {
            (type(module), name)
            for module in self._modules
            for name in log.names_read(module)
            if name not in vars(module) and name not in OWN
        }
        for cls, name in sorted(classes, key=str):
            value = getattr(cls, name, _MISSING)
            if isinstance(value, SCALARS):
                self._class_values.append((cls, name, value))

    def known(self) -> set[int]:
        """Return the ids of the containers that are compared."""
        return set(map(id, self._lives))

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        return (
            list(map(type, self._modules)) == self._types
            and self._named_hold()
            and self._contents_hold()
        )

    def _contents_hold(self) -> bool:
        return (
            list(map(_GET_FORWARD, self._classes)) == self._forwards
            and (not self._lives or same_objects(self._lives, self._copies))
            and (not self._class_values or self._class_values_hold())
        )

    def _class_values_hold(self) -> bool:
        return all(getattr(cls, name, _MISSING) is old for cls, name, old in self._class_values)

    def _named_hold(self) -> bool:
        _, holders, names, values = self._columns
        try:
            return all(map(operator.is_, map(operator.getitem, holders, names), values))
        except KeyError:
            return False

    def changes(self) -> list[Change]:
        """Compare each value and name what has changed."""
        found = []
        rows = zip(self._paths, self._modules, self._types, strict=True)
        for path, module, known in rows:
            if type(module) is not known:
                what = f"the class of {path!r}" if path else "the model's class"
                found.append(_change(what, known.__name__, type(module).__name__))
        for cls, forward in zip(self._classes, self._forwards, strict=True):
            if cls.forward is not forward:
                found.append(_change(f"{cls.__name__}.forward", "one function", "another one"))
        for title, holder, name, old in self._named:
            new = holder.get(name, _MISSING)
            if new is not old and not same_objects([new], [old]):
                found.append(_change(f"attribute {title!r}", _show(old), _show(new)))
        for title, live, copy in zip(self._names, self._lives, self._copies, strict=True):
            if not same_objects([live], [copy]):
                found.append(_difference(title, copy, live))
        for cls, name, old in self._class_values:
            new = getattr(cls, name, _MISSING)
            if new is not old and new != old:
                found.append(_change(f"{cls.__name__}.{name}", _show(old), _show(new)))
        return found

    def _add_contents(
        self, title: str, value: object, before: Mapping[int, tuple[Any, Any]]
    ) -> None:
        for inner_title, live in _walk(title, value, 0):
            known = before.get(id(live))
            if known is None or not same_objects([known[1]], [live]):
                continue  # the iteration has made or changed it
            if any(known is live for known in self._lives):
                continue
            self._lives.append(live)
            self._copies.append(_copy_of(live))
            self._names.append(inner_title)


def contents(model: nn.Module) -> dict[int, tuple[Any, Any]]:
    """Return every container of data that a model holds, with a copy, by its id."""
    return {
        id(live): (live, _copy_of(live))
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in OWN
        for _, live in _walk(name, value, 0)
    }


def _copy_of(live: Any) -> Any:
    """Return a shallow copy by the built-in type's own method: a subclass may have another."""
    if isinstance(live, dict):
        return dict.copy(live)
    return set.copy(live) if isinstance(live, set) else list.copy(live)


def _walk(title: str, value: object, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the containers in a value, itself included, that hold data alone."""
    if depth > _MAX_DEPTH:
        return
    live = value if isinstance(value, (*_CONTAINERS, tuple)) else data_of(value)
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


def data_of(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object that is nothing but data, such as a configuration."""
    if isinstance(value, (nn.Module, Tensor, torch.Generator, *_FUNCTIONS)):
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
    return value is None or isinstance(value, (*SCALARS, *_FUNCTIONS))


def is_named(value: object) -> bool:
    """Tell whether the guard notices another object in place of this one, or AttributeGuard."""
    if value is None or is_scalar(value) or isinstance(value, (*_FUNCTIONS, *_CONTAINERS, tuple)):
        return True
    return data_of(value) is not None


def _difference(title: str, old: Any, new: Any) -> Change:
    """Return the change of the first item that differs."""
    if isinstance(old, set):
        return _change(title, repr(old), repr(new))
    before = old if isinstance(old, dict) else dict(enumerate(old))
    now = new if isinstance(new, dict) else dict(enumerate(new))
    for key in dict.fromkeys((*before, *now)):
        left, right = dict.get(before, key, _MISSING), dict.get(now, key, _MISSING)
        if not same_objects([left], [right]):
            return _change(f"{key!r} of {title!r}", _show(left), _show(right))
    return _change(f"the order of {title!r}", "one", "another")


def _change(title: str, old: str, new: str) -> Change:
    new = new.replace("one ", "another ", 1) if new == old else new
    return Change(ChangeKind.ATTRIBUTE, title, old, new, _REMEDY)


def _show(value: object) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, _FUNCTIONS):
        return str(getattr(value, "__name__", "a function"))
    if value is None or isinstance(value, (*SCALARS, enum.Enum)):
        return repr(value)
    return f"one {type(value).__name__}"
