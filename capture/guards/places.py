"""Places: what a replay takes for granted, how it is asked for, and what it was."""

import datetime
import enum
import operator
import random
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from gc import get_referents
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphfsdp.base.torch_internals import dict_version, pop_function_mode, push_function_mode
from graphfsdp.errors import Change, ChangeKind

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
CONTAINERS = (dict, list, set, deque)
_PLAIN: tuple[type, ...] = (*_SCALARS, *_VALUES, torch.Generator)
_OF_CLASSES = (classmethod, staticmethod, property)
_IDENTITIES = (*FUNCTIONS, *_OF_CLASSES, types.CodeType, types.ModuleType, Tensor, nn.Module)
_RANDOM = (random.Random, np.random.RandomState, np.random.Generator)
_GETTERS = (getattr, dict.get, types.MappingProxyType.get)


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
        known: The answers that there were.
        exact: Only the very same objects will do, not equal ones.
        dicts: While nothing is written to these, the answers are what they were.
    """

    what: tuple[Any, ...]
    known: list[Any]
    exact: bool = False
    dicts: Sequence[dict[Any, Any]] = ()


def _nothing(title: str, old: Any, new: Any) -> Iterable[Change]:
    return ()


@dataclass(slots=True)
class Place:
    """Something that a replay takes for granted: how to ask for it, and what it was.

    Attributes:
        title: Its name for messages.
        what: A function, in C if it is to be asked often, and what it is called with.
        known: What it gave; of a container, a copy of what that held.
        named: Yields the changes, from the title, what it gave, and what it gives now; nothing
            where that does not matter, or where another place tells it.
        exact: Another object is looked at closely, equal or not.
        dicts: While nothing is written to these, it gives what it gave.
        cover: Makes one question to all places with the same one, from what they are asked of.
        name: By which code comes to it: of a variable, or of an attribute with a dot before it.
        owner: The object whose attribute it is, if it is one.
        of_class: The class whose attribute it is, if it is one; what holds it cannot be written.
    """

    title: str
    what: tuple[Any, ...]
    known: Any
    named: Callable[[str, Any, Any], Iterable[Change]] = _nothing
    exact: bool = False
    dicts: Sequence[Any] = ()
    cover: Callable[[list[Any]], Ask] | None = None
    name: str = ""
    owner: Any = None
    of_class: type | None = None

    @property
    def holder(self) -> Any:
        """The dict, or object, that has it under a key, or as an attribute; None if none does."""
        return self.what[1] if self.what[0] in _GETTERS else None

    @property
    def key(self) -> Any:
        return self.what[2] if self.what[0] in _GETTERS else None

    @property
    def live(self) -> Any:
        """What is looked at itself, such as a container; None for what a holder has."""
        if self.what[0] in _GETTERS:
            return None
        return self.what[1][0] if self.what[0] is operator.getitem else self.what[1]

    def look(self) -> Any:
        """Return what is there now."""
        function, *given = self.what
        try:
            return function(*given)
        except Exception:  # an empty cell, what was deleted, or of the users' own classes
            return MISSING

    def changes(self) -> Iterable[Change]:
        now = self.look()
        if now is self.known or (not self.exact and same_objects(now, self.known)):
            return ()
        return self.named(self.title, self.known, now)


class Places:
    """Places of one kind.

    Attributes:
        asks: One question for each way to ask.
    """

    asks: list[Ask]

    def __init__(
        self,
        find: Callable[[], Iterable[Place]],
        say: Callable[[Change], Change] = lambda change: change,
    ) -> None:
        """``find`` finds them as they are when it is called; ``say`` puts changes otherwise."""
        self._find = find
        self._say = say
        self._renew()

    def changes(self) -> list[Change]:
        """Look at each and name what has changed; what does not matter is taken for what was."""
        found = [self._say(change) for place in self._places for change in place.changes()]
        if not found:
            self._renew()
        return found

    def _renew(self) -> None:
        self._places = list(self._find())
        self.asks = asks_of(self._places)


def asks_of(places: Iterable[Place]) -> list[Ask]:
    """Return one question for each way to ask."""
    alike: dict[tuple[Any, bool, bool], list[Place]] = {}
    for place in places:
        are_watched = bool(place.dicts) and all(isinstance(each, dict) for each in place.dicts)
        way = place.cover or place.what[0]
        alike.setdefault((way, place.exact, are_watched), []).append(place)
    found = []
    for (way, exact, are_watched), group in alike.items():
        if group[0].cover is not None:
            found.append(way([place.what[1] for place in group]))
            continue
        columns = zip(*(place.what[1:] for place in group), strict=True)
        dicts = [each for place in group for each in place.dicts] if are_watched else ()
        known = [place.known for place in group]
        found.append(Ask((way, *map(list, columns)), known, exact, dicts))
    return found


def are_empty(tables: list[Any]) -> Ask:
    """Ask of many containers at once whether all of them are empty; a ``cover``."""
    return Ask((any, [tables]), [False], exact=True)


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


_NO_TENSOR_IS_EQUAL = _NoTensorIsEqual()


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
    """Asks of all kinds of places, put together: one call for each function."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self._watched: list[Ask] = []
        alike: dict[tuple[Any, bool], list[Ask]] = {}
        for ask in asks:
            if ask.dicts:
                self._watched.append(ask)
            else:
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
    push_function_mode(_NO_TENSOR_IS_EQUAL)
    try:
        return bool(live == copy)
    except Exception:  # _TensorsComparedError, or what the users' own objects raise
        return False
    finally:
        pop_function_mode()


def differing(old: dict[Any, Any], new: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the keys that do not have the same object in both, with what they have."""
    for key in dict.fromkeys((*old, *new)):
        before, now = dict.get(old, key, MISSING), dict.get(new, key, MISSING)
        if before is not now:
            yield key, before, now


def change_of(title: str, old: Any, new: Any) -> Change:
    """Return the change of a value; of a container, of the first item that differs."""
    remedy = _remedy(new if old is MISSING else old)
    title, old, new = _first_difference(title, old, new)
    return Change(ChangeKind.ATTRIBUTE, title, *in_words(old, new), remedy)


def in_words(old: object, new: object) -> tuple[str, str]:
    was, now = _show(old, new), _show(new, old)
    return was, now.replace("one ", "another ", 1) if was == now else now


def _remedy(old: object) -> str:
    if isinstance(old, Tensor):
        return "write new values into the old tensor (copy_, fill_), which replays see"
    if isinstance(old, nn.Module):
        return "replace modules before the capture, or load weights in place (load_state_dict)"
    if isinstance(old, (*FUNCTIONS, types.CodeType)):
        return "replace functions before the capture, and leave them so"
    return (
        "pass what changes as a tensor of the batch, or hold it in a tensor, such as a buffer of "
        "the model, and write into that (fill_, copy_), which replays see"
    )


def is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string, or the like, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def copy_of(live: Any) -> Any:
    """Return what an array or a container holds, by the built-in type's own method."""
    if isinstance(live, np.ndarray):
        return live.tobytes(), live.shape, live.dtype
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
    for key, left, right in differing(before, now):
        if not same_objects([left], [right]):
            return f"{key!r} of {title.removeprefix('the items of ')}", left, right
    return f"the order of {title}", old, new


def _show(value: object, other: object) -> str:
    """Return a value in words; ``other`` is beside it in the message."""
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


def is_drawn_from(value: Any) -> bool:
    """Tell whether it gives another value each time: a random generator, an iterator."""
    if isinstance(value, _RANDOM):
        return not isinstance(value, random.SystemRandom)
    kind = type(value)
    is_pythons = kind.__module__.partition(".")[0] in ("builtins", "itertools")
    return is_pythons and callable(getattr(kind, "__next__", None))


def shared_generators() -> dict[str, tuple[Any, str]]:
    """Return the generators that the functions of Python's and NumPy's modules draw from."""
    numpys: Any = np.random.mtrand
    return {"random": (random._inst, "random"), "numpy.random": (numpys._rand, ".random")}


def words_for(title: str, value: Any) -> str:
    if isinstance(value, _RANDOM):
        return f"draws from a generator of Python or NumPy ({title})"
    return f"advances an iterator ({title})"


def state_of(value: Any) -> Any:
    """Return what tells how far a generator or an iterator has come."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        state: Any = value.get_state()
        return (state[0], state[1].tobytes(), *state[2:])
    return _position_of(value, 0)


def _position_of(value: Any, depth: int) -> Any:
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "finished"
        parts: Any = (frame.f_lasti, *frame.f_locals.values(), *get_referents(value))
    elif isinstance(value, tuple):
        parts = value
    elif callable(getattr(type(value), "__next__", None)) and not hasattr(value, "__dict__"):
        parts = (operator.length_hint(value, -1), *get_referents(value))
    else:
        return type(value).__name__
    return tuple(_position_of(part, depth + 1) for part in parts) if depth < 6 else None
