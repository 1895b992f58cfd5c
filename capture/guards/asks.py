"""How guards ask: many things in one call, compared with what they were."""

import contextvars
import datetime
import enum
import operator
import types
import uuid
from array import array
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.torch_internals import dict_version

MISSING = object()
_SCALARS = (
    *(int, float, bool, str, complex, bytes, type(None), range, slice),
    *(torch.dtype, torch.device),
)
# Of these classes, too, what is the same is equal, and nothing else is in it.
_VALUES = (
    *(enum.Enum, np.generic, Decimal, Fraction, uuid.UUID),
    *(datetime.date, datetime.time, datetime.timedelta),
)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
CONTAINERS = (dict, list, set, deque, bytearray, array)
_PLAIN: tuple[type, ...] = (*_SCALARS, *_VALUES, torch.Generator)
_OF_CLASSES = (classmethod, staticmethod, property)
_IDENTITIES = (*FUNCTIONS, *_OF_CLASSES, types.CodeType, types.ModuleType, Tensor, nn.Module)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question to many things.

    Note [Cost of guards]: a guard runs before each replay, and Python pays 50 ns and more for each
    attribute that it reads, and far more for each line and each function that has not run for a
    while. So the usual answer, "nothing has changed", comes from few calls that each ask many
    things; only when an answer differs is each thing looked at, and named. What lies in dicts is
    not even asked for as long as nobody has written to them.

    Attributes:
        what: ``map`` of these gives the answers: a function in C, and lists to call it with.
        known: The answers when the guard was armed.
        exact: Only the very same objects will do, not equal ones.
        dicts: While nothing is written to these, the answers are what they were.
    """

    what: tuple[Any, ...]
    known: list[Any]
    exact: bool = False
    dicts: Sequence[dict[Any, Any]] = ()


class Guard(Protocol):
    """Watches one sort of thing that a graph has baked in."""

    def asks(self) -> Iterable[Ask]:
        """Yield what tells that nothing has changed; asked anew where a change did not matter."""
        ...

    def changes(self) -> list[Change]:
        """Compare everything and name what has changed; maybe nothing that matters."""
        ...


_GIVE_PLAIN = (Tensor.data_ptr, len, operator.call)  # numbers and switches, never tensors


class _TensorsComparedError(Exception):
    """Two different tensors met in a comparison."""


class _NoTensorIsEqual(TorchFunctionMode):
    """Ends a comparison that comes to two different tensors, before it asks for their values.

    Python takes identical elements for equal without a look at them, and asks others. A tensor of
    one element would answer by its value, on a GPU even after waiting for it.
    """

    def __torch_function__(self, *args: Any) -> Any:
        raise _TensorsComparedError


def hold(asks: Iterable[Ask]) -> bool:
    """Tell quickly that all answers are what they were; False means: look closely."""
    answers, known = [], []
    try:
        for ask in asks:
            if ask.exact:
                if not all(map(operator.is_, map(*ask.what), ask.known)):
                    return False
                continue
            now = list(map(*ask.what))
            if ask.what[0] not in _GIVE_PLAIN:
                answers.append(now)
                known.append(ask.known)
            elif now != ask.known:
                return False
    except Exception:  # of what was deleted, or of the users' own objects
        return False
    return not answers or same_objects(answers, known)


class Asked:
    """Asks of all guards, put together: one call for each function."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self._watched: list[Ask] = []
        alike: dict[tuple[Any, bool], list[Ask]] = {}
        for ask in asks:
            if ask.dicts and all(isinstance(each, dict) for each in ask.dicts):
                self._watched.append(ask)
            elif ask.known:
                alike.setdefault((ask.what[0], ask.exact), []).append(ask)
        self._others = list(map(_joined, alike.values()))
        dicts = {id(each): each for ask in self._watched for each in ask.dicts}
        self._dicts = list(dicts.values())
        self._version = self._sum_of_versions()

    def hold(self) -> bool:
        """Tell quickly that all answers are what they were; False means: look closely."""
        version = self._sum_of_versions()
        if version != self._version:
            if not hold(self._watched):
                return False
            self._version = version
        return hold(self._others)

    def _sum_of_versions(self) -> int:
        # A write gives its dict a number that is higher than any dict has had before.
        return sum(map(dict_version, self._dicts))


def _joined(asks: Sequence[Ask]) -> Ask:
    """Return one question for several that call the same function."""
    columns = zip(*(ask.what[1:] for ask in asks), strict=True)
    what = (asks[0].what[0], *(list(chain.from_iterable(column)) for column in columns))
    return Ask(what, list(chain.from_iterable(ask.known for ask in asks)), asks[0].exact)


def same_objects(live: Any, copy: Any) -> bool:
    """Compare containers in one call; tensors are equal only to themselves."""
    try:
        with _NoTensorIsEqual():
            return bool(live == copy)
    except Exception:  # _TensorsComparedError, or what the users' own objects raise
        return False


@dataclass(slots=True)
class Place:
    """Where a value is found, and what it was.

    Attributes:
        title: Its name for messages.
        holder: A dict, the attributes of a class, or an object whose attribute it is.
        key: The key in there, or the attribute.
        value: What was found; with ``live``, a copy of what that held.
        live: What is looked at itself; see ``copy_of``.
        is_exact: Another object in its place is a change, equal or not.
        name: By which code comes to it: of a variable, or of an attribute with a dot before it.
        owner: The object whose attribute it is, if it is one.
        of_class: The class whose attribute it is, if it is one; what holds it cannot be written.
    """

    title: str
    holder: Any
    key: Any
    value: Any
    live: Any = None
    is_exact: bool = False
    name: str = ""
    owner: Any = None
    of_class: type | None = None

    def look(self) -> Any:
        """Return what is found now."""
        if self.live is not None:
            return copy_of(self.live)
        try:
            return _way_to(self)(self.holder, self.key, MISSING)
        except Exception:  # an empty cell, or of the users' own classes
            return MISSING

    def is_same(self, now: Any) -> bool:
        """Tell whether that is the same to an iteration as what was found."""
        return now is self.value or (not self.is_exact and same(self.value, now))


@dataclass
class Places:
    """Named values that must stay what they are; what several guards consist of.

    Attributes:
        remedy: What to do about a change: a text, or what makes one of the old value.
        places: By title.
    """

    remedy: str | Callable[[Any], str]
    places: dict[str, Place] = field(default_factory=dict)

    def add(self, place: Place) -> None:
        """Add a place, under a title of its own."""
        number, title = 1, place.title
        while place.title in self.places:
            number += 1
            place.title = f"{title} ({number})"
        self.places[place.title] = place

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that were found, also in lists, with names for messages."""
        for title, place in self.places.items():
            if isinstance(place.value, Tensor):
                yield title, place.value
            elif isinstance(place.value, (list, deque)):
                for index, item in enumerate(place.value):
                    if isinstance(item, Tensor):
                        yield f"{index} of {title.removeprefix('the items of ')}", item

    def asks(self, *, watched: bool = False) -> Iterator[Ask]:
        """Yield one question for each way to look.

        Args:
            watched: The dicts that hold the values are seldom written to.
        """
        found: dict[tuple[Any, bool], list[Place]] = {}
        for place in self.places.values():
            found.setdefault((_way_to(place), isinstance(place.live, dict)), []).append(place)
        for (way, are_dicts), places in found.items():
            live, known = [each.live for each in places], [each.value for each in places]
            if way is copy_of:
                yield Ask((way, live), known)
            elif way is operator.getitem:
                what = (way, [live] * len(live), range(len(live)))
                yield Ask(what, known, dicts=live if are_dicts else ())
            else:
                holders, keys = [each.holder for each in places], [each.key for each in places]
                dicts = holders if watched and way is dict.get else ()
                yield Ask((way, holders, keys, [MISSING] * len(keys)), known, True, dicts)

    def changes(self) -> list[Change]:
        """Compare each place and name what has changed; else take equal values for the old ones."""
        found = []
        for place in self.places.values():
            now = place.look()
            if place.is_same(now):
                if place.live is None:
                    place.value = now
            else:
                found.append(change_of(place.title, place.value, now, self.remedy))
        return found


def _way_to(place: Place) -> Callable[..., Any]:
    if place.live is not None:
        return operator.getitem if isinstance(place.live, CONTAINERS) else copy_of
    for kind in (dict, types.MappingProxyType):
        if isinstance(place.holder, kind):
            return kind.get
    return getattr


def change_of(title: str, old: Any, new: Any, remedy: str | Callable[[Any], str]) -> Change:
    """Return the change of a value; of a container, of the first item that differs."""
    title, old, new = _first_difference(title, old, new)
    words = show(old, new), show(new, old)
    if words[0] == words[1]:
        words = words[0], words[1].replace("one ", "another ", 1)
    text = remedy if isinstance(remedy, str) else remedy(old)
    return Change(ChangeKind.ATTRIBUTE, title, *words, text)


def is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string, or the like, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def copy_of(live: Any) -> Any:
    """Return what a container holds, by the built-in type's own method.

    Or an array, a context variable, a view of dicts that others hold; what a function tells.
    """
    if isinstance(live, contextvars.ContextVar):
        try:
            return live.get()
        except LookupError:
            return MISSING
    if isinstance(live, (types.MappingProxyType, ChainMap)):
        return dict(live)
    if isinstance(live, partial):
        return live()
    if isinstance(live, np.ndarray):
        return live.tobytes(), live.shape, live.dtype
    if isinstance(live, array):
        return live[:]
    kind: Any = next(kind for kind in CONTAINERS if isinstance(live, kind))
    return kind.copy(live)


def same(old: Any, new: Any) -> bool:
    """Tell whether two values are the same to an iteration.

    Objects of the user's classes are, if they are of one class: what is read of them has places
    of its own.
    """
    if old is new:
        return True
    if isinstance(old, types.MethodType) and isinstance(new, types.MethodType):
        return old.__func__ is new.__func__ and old.__self__ is new.__self__
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _is_same_memory(old, new)
    if type(old) is not type(new) or isinstance(old, _IDENTITIES):
        return False
    if is_plain(old):
        if isinstance(old, (float, complex, tuple, np.generic)):
            return repr(old) == repr(new)  # tells 0.0 from -0.0, and NaN is NaN
        return not isinstance(old, torch.Generator) and bool(old == new)
    return not isinstance(old, (*CONTAINERS, tuple)) or same_objects(old, new)


def _is_same_memory(old: Tensor, new: Tensor) -> bool:
    """Tell whether two tensors are one and the same to a kernel."""
    if type(old) is not type(new) or type(old) not in (Tensor, nn.Parameter):
        return False
    if old.layout is not torch.strided or new.layout is not torch.strided:
        return False
    try:
        facts = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in (old, new)]
    except RuntimeError:  # of a wrapper that vmap or grad has made
        return False
    return facts[0] == facts[1]


def _first_difference(title: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    if not all(isinstance(each, (dict, list, deque)) for each in (old, new)):
        return title, old, new
    before = old if isinstance(old, dict) else dict(enumerate(old))
    now = new if isinstance(new, dict) else dict(enumerate(new))
    for key in dict.fromkeys((*before, *now)):
        left, right = dict.get(before, key, MISSING), dict.get(now, key, MISSING)
        if not same_objects([left], [right]):
            return f"{key!r} of {title.removeprefix('the items of ')}", left, right
    return f"the order of {title}", old, new


def show(value: object, other: object) -> str:
    """Return a value in words.

    Args:
        value: What to show.
        other: The value beside it in the message.
    """
    if value is MISSING:
        return "missing"
    if is_plain(value):
        return repr(value)
    if isinstance(value, (set, list, deque)) and len(value) <= 8 and all(map(is_plain, value)):
        return repr(value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return "a function" if type(other) is not type(value) else "one function"
    name = type(value).__name__
    return f"one {name}" if type(other) is type(value) else f"a {name}"
