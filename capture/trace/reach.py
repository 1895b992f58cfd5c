"""What Python code leads to, beyond what it names: one rule, for snapshots and for guards."""

import functools
import types
from collections.abc import Iterator
from typing import Any

# With one of these in it, code may look up by strings what it reads.
INDIRECT = frozenset(
    {
        *("globals", "modules", "getattr", "attrgetter", "methodcaller", "vars", "__dict__"),
        *("asdict", "astuple"),
    }
)
# Special methods that no iteration calls, or whose text no number of it comes from.
_AT_OTHER_TIMES = frozenset(
    {
        *("__init__", "__init_subclass__", "__new__", "__repr__", "__del__", "__set_name__"),
        *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__"),
        *("__str__", "__format__", "__post_init__", "__class_getitem__", "__dir__", "__sizeof__"),
        "__annotate__",
    }
)


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


def is_called_by_python(name: str, function: Any) -> bool:
    """Tell whether operators, ``with``, ``for``, ``len`` and the like call a method of this name.

    What dataclasses have made by themselves compares all fields, and is called by no code that
    trains.
    """
    if not (name.startswith("__") and name.endswith("__")) or name in _AT_OTHER_TIMES:
        return False
    code = getattr(function, "__code__", None)
    return not (isinstance(code, types.CodeType) and "__create_fn__" in code.co_qualname)


def special_methods(kind: type) -> Iterator[tuple[type, str]]:
    """Yield what Python calls by itself on things of a class: who has it, and its name."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if any(is_called_by_python(name, function) for function in functions_of(member)):
                yield base, name
