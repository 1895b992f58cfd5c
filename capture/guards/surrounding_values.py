"""Values around the user's functions: how each is looked at again, and when it is another one."""

import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.modules import SCALARS, same_objects

MISSING = object()
Look = functools.partial[Any]
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
CONTAINERS = (dict, list, set, deque)
_PLAIN = (*SCALARS, type(None), bytes, range, slice, enum.Enum, np.generic)
# Compared by identity; of all other objects, what is read of them counts.
_IDENTITIES = (
    *FUNCTIONS,
    type,
    types.CodeType,
    Tensor,
    nn.Module,
    types.ModuleType,
    functools.partial,
)


@dataclass(slots=True)
class Place:
    """Where a value is found, and what it was.

    Attributes:
        title: Its name for messages; no two places have the same one.
        look: Finds it again.
        value: What was found; of a container or an array, a copy of what it held.
        live: The container or array itself; None: ``value`` is what ``look`` found.
        holder: Id of what it is found in; 0: of nothing that others look at.
        is_exact: Another object in its place is a change, whatever that is.
    """

    title: str
    look: Callable[[], Any]
    value: Any
    live: Any = None
    holder: int = 0
    is_exact: bool = False


class Places:
    """Collects places, each once, under titles of their own.

    Attributes:
        places: What was found, by title.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.places: dict[str, Place] = {}
        self._found: set[tuple[object, ...]] = set()
        self._seen: set[tuple[object, ...]] = set()
        self._alive: list[object] = []  # whose ids are in there

    @property
    def num_seen(self) -> int:
        """How much was new so far."""
        return len(self._seen)

    def place(self, title: str, look: Look, value: Any) -> Place | None:
        """Note a value that ``look`` finds again; None if that place is known."""
        *holders, name = look.args[:2]  # the last one that counts is a name
        return self._add(("at", *map(id, holders), repr(name)), title, look, value, None)

    def live(self, title: str, live: Any) -> None:
        """Note what a container or an array holds."""
        look = functools.partial(copy_of, live)
        self._add(("in", id(live)), title, look, look(), live)

    def is_new(self, what: str, *parts: object) -> bool:
        """Tell whether so much is asked for the first time."""
        key = (what, *(part if isinstance(part, str) else id(part) for part in parts))
        self._alive.extend(parts)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _add(
        self, key: tuple[object, ...], title: str, look: Look, value: Any, live: Any
    ) -> Place | None:
        if key in self._found:
            return None
        self._found.add(key)
        self._alive.append(value)
        number, unique = 1, title
        while unique in self.places:
            number += 1
            unique = f"{title} ({number})"
        holder = key[1] if isinstance(key[1], int) else 0
        self.places[unique] = place = Place(unique, look, value, live, holder)
        return place


def is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string, or the like, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def copy_of(live: Any) -> Any:
    """Return what a container or an array holds, by the built-in type's own method."""
    if isinstance(live, np.ndarray):
        return live.tobytes(), live.shape, live.dtype
    kind = next(kind for kind in CONTAINERS if isinstance(live, kind))
    return kind.copy(live)


def without_tensors(value: Any) -> Any:
    """Return a value, or a copy of a container, that keeps no tensor alive."""
    if isinstance(value, Tensor):
        return weakref.ref(value)
    if isinstance(value, dict):
        return {key: without_tensors(item) for key, item in dict.items(value)}
    if isinstance(value, (list, deque)) or type(value) is tuple:
        return [without_tensors(item) for item in value]
    return value


def same(old: object, new: object) -> bool:
    """Tell whether two values are the same to an iteration.

    Objects of the user's classes are, if they are of one class: what is read of them has places
    of its own.
    """
    if old is new:
        return True
    if isinstance(old, types.MethodType) and isinstance(new, types.MethodType):
        return old.__func__ is new.__func__ and old.__self__ is new.__self__
    if type(old) is not type(new) or isinstance(old, _IDENTITIES):
        return False
    if isinstance(old, (float, complex, tuple, np.generic)) and is_plain(old):
        return repr(old) == repr(new)  # tells 0.0 from -0.0, and NaN is NaN
    if is_plain(old):
        return not isinstance(old, torch.Generator) and bool(old == new)
    if isinstance(old, (dict, list, set, deque, tuple)):
        return same_objects([old], [new])
    return True


def is_same_memory(old: Tensor, new: Tensor) -> bool:
    """Tell whether two tensors are one and the same to a kernel."""
    if old is new:
        return True
    if type(old) is not type(new) or type(old) not in (Tensor, nn.Parameter):
        return False
    if old.layout is not torch.strided or new.layout is not torch.strided:
        return False
    facts = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in (old, new)]
    return facts[0] == facts[1]


def first_difference(title: str, old: Any, new: Any) -> tuple[str, object, object]:
    """Return the title and both values of what differs in two copies of a container.

    Args:
        title: Of the container.
        old: What it held.
        new: What it holds now; anything.
    """
    if type(old) is type(new) and isinstance(old, (dict, list, deque)):
        before = old if isinstance(old, dict) else dict(enumerate(old))
        now = new if isinstance(new, dict) else dict(enumerate(new))
        for key in dict.fromkeys((*before, *now)):
            left, right = dict.get(before, key, MISSING), dict.get(now, key, MISSING)
            if not same_objects([left], [right]):
                return f"{key!r} of {title.removeprefix('the items of ')}", left, right
    return title, old, new


def show(value: object, other: object) -> str:
    """Return a value in words.

    Args:
        value: What to show.
        other: The value beside it in the message.
    """
    if value is MISSING:
        return "missing"
    if is_plain(value) and not isinstance(value, torch.Generator):
        return repr(value)
    if isinstance(value, (set, list, deque)) and len(value) <= 8 and all(map(is_plain, value)):
        return repr(value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return "a function" if type(other) is not type(value) else "one function"
    name = type(value).__name__
    return f"one {name}" if type(other) is type(value) else f"a {name}"
