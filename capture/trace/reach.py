"""What Python code leads to, beyond what it names: one rule, for snapshots and for guards."""

import datetime
import enum
import functools
import sys
import types
import uuid
import weakref
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MISSING = object()
SCALARS: frozenset[type] = frozenset(
    {int, float, bool, str, complex, bytes, type(None), range, slice, torch.dtype, torch.device}
)
# Of these classes, too, what is the same is equal, and nothing else is in it.
VALUES = (
    *(enum.Enum, np.generic, Decimal, Fraction, uuid.UUID),
    *(datetime.date, datetime.time, datetime.timedelta),
)
# What every module has; its mode is set by whoever calls the iteration.
OWN = frozenset((*vars(nn.Module()), *dir(nn.Module)))

# With one of these in it, code may look up by strings what it reads.
INDIRECT = frozenset(
    {
        *("globals", "modules", "getattr", "attrgetter", "methodcaller", "vars", "__dict__"),
        *("asdict", "astuple"),
    }
)
_OF_FUNCTIONS = frozenset({"forward", "backward", "setup_context"})
# Special methods that no iteration calls, or whose text no number of it comes from.
_AT_OTHER_TIMES = frozenset(
    {
        *("__init__", "__init_subclass__", "__new__", "__repr__", "__del__", "__set_name__"),
        *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__"),
        *("__str__", "__format__", "__post_init__", "__class_getitem__", "__dir__", "__sizeof__"),
        "__annotate__",
    }
)


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes, and strings where code looks up by strings."""
    found = set(code.co_names)
    if found & INDIRECT:
        found |= {constant for constant in code.co_consts if isinstance(constant, str)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return frozenset(found)


def numbers_in(code: types.CodeType) -> frozenset[float]:
    """Return the constants of a function that are numbers."""
    found: set[float] = set()
    for constant in code.co_consts:
        items = constant if isinstance(constant, tuple) else (constant,)
        found |= {item for item in items if type(item) in (int, float)}
        if isinstance(constant, types.CodeType):
            found |= numbers_in(constant)
    return frozenset(found)


def loaded(names: AbstractSet[str]) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the modules of these names, which code may import by itself, or take of sys.modules."""
    for name in sorted(names & sys.modules.keys()):
        module = sys.modules[name]
        if isinstance(module, types.ModuleType):
            yield name, module


class WeakTensor(weakref.ref[Tensor]):
    """None of the users' own weak references."""


def without_tensors(value: Any) -> Any:
    """Return a weak reference to a tensor; other values are what they are."""
    return WeakTensor(value) if issubclass(type(value), Tensor) else value


def called_instead(function: Any) -> list[Any]:
    """Return what runs when somebody calls a wrapper: what it wraps, or one of several."""
    wrapped = getattr(function, "__wrapped__", None)
    found = [wrapped] if callable(wrapped) else []
    if isinstance(function, functools.partial):
        found.append(function.func)
    elif isinstance(function, types.MethodType):
        found.append(function.__func__)
    registry = getattr(function, "registry", None)  # of functools.singledispatch
    if isinstance(registry, types.MappingProxyType):
        found += registry.values()
    return found


def functions_of(member: Any) -> list[Any]:
    """Return the functions that run when somebody uses what a class has under a name.

    Of a method, a property, and what functools makes for classes; empty for data.
    """
    if isinstance(member, (classmethod, staticmethod)):
        return functions_of(member.__func__)
    if isinstance(member, property):
        return [] if member.fget is None else functions_of(member.fget)
    if isinstance(member, functools.singledispatchmethod):
        return list(member.dispatcher.registry.values())
    if isinstance(member, (functools.partialmethod, functools.cached_property)):
        return functions_of(member.func)
    if isinstance(member, types.FunctionType) or hasattr(member, "__wrapped__"):
        return [member]
    return []


def is_called_by_itself(kind: type, name: str, function: Any) -> bool:
    """Tell whether operators, ``with``, ``for``, ``len`` and the like call a method of this name.

    Or autograd does. What dataclasses have made by themselves compares all fields, and is called
    by no code that trains.
    """
    if issubclass(kind, torch.autograd.Function) and name in _OF_FUNCTIONS:
        return True
    if not (name.startswith("__") and name.endswith("__")) or name in _AT_OTHER_TIMES:
        return False
    code = getattr(function, "__code__", None)
    return not (isinstance(code, types.CodeType) and "__create_fn__" in code.co_qualname)


def special_methods(kind: type) -> Iterator[tuple[type, str]]:
    """Yield what is called by itself on things of a class: who has it, and its name."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if any(is_called_by_itself(kind, name, function) for function in functions_of(member)):
                yield base, name
