"""How what can change in place is read, set, and put back to what it held."""

import contextlib
import contextvars
import operator
import random
import types
import warnings
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from gc import get_referents
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from graphfsdp._capture.trace.reach import MISSING, OWN, SCALARS


def position_of(value: Any, depth: int) -> Any:
    """Return what tells how far an iterator has come."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "finished"
        parts: Iterator[Any] = iter(
            [frame.f_lasti, *frame.f_locals.values(), *get_referents(value)]
        )
    elif isinstance(value, tuple):
        parts = iter(value)
    elif callable(getattr(type(value), "__next__", None)) and not hasattr(value, "__dict__"):
        parts = iter((operator.length_hint(value, -1), _reduced(value)))
    else:
        return type(value).__name__
    return tuple(position_of(part, depth + 1) for part in parts) if depth < 6 else None


def _reduced(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python wants to do away with it for those of itertools
        try:
            return value.__reduce__()
        except TypeError:
            return tuple(get_referents(value))


def state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    name, keys, *rest = generator.get_state()
    return (name, keys.tobytes(), *rest)


class InTuple(NamedTuple):
    """A tuple, by who holds it and under which key: its items are set by making another one."""

    holder: Any
    key: Any


def look_up(holder: Any, key: Any) -> Any:
    if isinstance(holder, InTuple):
        return look_up(*holder)[key]
    if isinstance(holder, contextvars.ContextVar):
        return holder.get()
    if isinstance(holder, types.FunctionType):
        return (holder.__defaults__ or ())[key]
    is_item = isinstance(holder, (list, deque)) or _is_key(holder, key)
    return holder[key] if is_item else getattr(holder, key)


def put(holder: Any, key: Any, value: Any) -> None:
    """Put another value in place of one that a holder has."""
    if isinstance(holder, InTuple):
        now = look_up(*holder)
        items = [*now[:key], value, *now[key + 1 :]]
        put(*holder, type(now)(*items) if hasattr(now, "_fields") else tuple(items))
    elif isinstance(holder, contextvars.ContextVar):
        holder.set(value)
    elif isinstance(holder, types.FunctionType):
        defaults = holder.__defaults__ or ()
        holder.__defaults__ = (*defaults[:key], value, *defaults[key + 1 :])
    elif _is_key(holder, key):
        dict.__setitem__(holder, key, value)
    elif isinstance(holder, (list, deque)):
        holder[key] = value
    elif isinstance(holder, type):
        setattr(holder, key, value)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        object.__setattr__(holder, key, value)


def _is_key(holder: Any, key: Any) -> bool:
    """Tell whether it is one of a dict, not a slot of somebody's own kind of dict."""
    return isinstance(holder, dict) and dict.__contains__(holder, key)


def put_array(holder: Any, value: Any) -> None:
    if isinstance(holder, np.ndarray):
        holder[...] = value
    else:
        holder[:] = type(holder)(holder.typecode, value) if isinstance(holder, array) else value


def put_length(holder: Any, length: int) -> None:
    """Make a container so long: with its last entry over again, or entries of no meaning."""
    more = length - len(holder)
    if isinstance(holder, (list, deque, bytearray, array)):
        if more > 0:
            last = holder[-1] if len(holder) else 0
            holder.extend([last] * more)
        while len(holder) > length:
            holder.pop()
    elif more > 0 and isinstance(holder, (set, dict)):
        fresh = (f"graphfsdp {index}" for index in range(more))
        if isinstance(holder, set):
            holder.update(fresh)
        else:
            holder.update(dict.fromkeys(fresh, next(iter(dict.values(holder)), None)))


def items_of(live: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return them as a dict holds them: somebody's own may load or compute what is asked for."""
    kind = OrderedDict if isinstance(live, OrderedDict) else dict  # whose order is its own
    return kind.items(live)


def put_back_dict(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if [key for key, _ in items_of(live)] != list(saved):
        live.clear()
        live.update(saved)
    put_back_names(live, saved)


def put_back_names(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key, value in saved.items():
        if dict.get(live, key, MISSING) is not value:
            live[key] = value


def put_back_module(live: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in [key for key in live if key not in saved and key not in OWN]:
        if not isinstance(live[key], Tensor):
            del live[key]
    put_back_names(live, saved)


def put_back_attributes(live: Any, saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if value is MISSING:
            with contextlib.suppress(AttributeError):
                object.__delattr__(live, key)
        elif not isinstance(live, type) or vars(live).get(key, MISSING) is not value:
            put(live, key, value)


def put_back_items(live: Any, saved: list[Any]) -> None:
    if len(live) != len(saved) or not all(map(operator.is_, live, saved)):
        live.clear()
        live.extend(saved)


def put_back_set(live: set[Any], saved: set[Any]) -> None:
    if live != saved:
        live.clear()
        live.update(saved)


def put_back_array(live: Any, saved: Any) -> None:
    if isinstance(live, np.ndarray):
        if live.flags.writeable:
            live[...] = saved
    else:
        live[:] = saved


def put_back_generator(live: Any, saved: Any) -> None:
    if isinstance(live, random.Random):
        live.setstate(saved)
    elif isinstance(live, np.random.Generator):
        live.bit_generator.state = saved
    else:
        live.set_state((saved[0], np.frombuffer(saved[1], dtype=np.uint32), *saved[2:]))
