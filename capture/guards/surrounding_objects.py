"""Finds what code reads of values: of objects and their classes, of containers, of modules."""

import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.surrounding_values import CONTAINERS, MISSING, Look, Places, is_plain
from graphfsdp._capture.trace.code_names import CodeNames
from graphfsdp._capture.trace.source import is_installed_file, is_users_file

MAX_INSTALLED_DEPTH = 4  # calls from one function of an installed package to the next
_MAX_COPIED = 10_000  # items
_MAX_VISITED = 1_000
_MAX_LEVEL = 32  # of objects in objects; some make up new ones for ever
_SIMPLE_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_CALLABLES = (types.MethodType, functools.partial, functools._lru_cache_wrapper)
# Called without a name in the code.
_SPECIAL = frozenset(
    {
        *(
            "__call__",
            "__getitem__",
            "__getattr__",
            "__iter__",
            "__next__",
            "__len__",
            "__contains__",
        ),
        *("__enter__", "__exit__", "__float__", "__int__", "__bool__", "__mul__", "__rmul__"),
        *("__add__", "__radd__", "__torch_function__"),
    }
)
_OF_NEW = frozenset({"__init__", "__post_init__"})
_OF_AUTOGRAD = frozenset({"forward", "backward", "setup_context", "vjp", "jvp", "vmap"})
# What getattr makes a new object of each time.
_BUILT_IN = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.BuiltinFunctionType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType),
)
_OF_NO_INTEREST = ("torch.", "graphfsdp.")  # objects of these libraries' classes

Form = Callable[[str], str]  # makes a title of an attribute's name
Owner = tuple[object, Form]


class ObjectSearch(Places):
    """Walks through values by what code reads of them, and leaves functions for later.

    Attributes:
        modules: Those that were found, by id.
        later: Functions that were found and are still to be looked into: with the object that they
            belong to, and how deep in an installed package.
    """

    def __init__(self, elsewhere: set[str]) -> None:
        """Begin.

        Args:
            elsewhere: Attributes that functions read of what they are handed.
        """
        super().__init__()
        self.modules: dict[int, nn.Module] = {}
        self.later: list[tuple[object, Owner | None, int]] = []
        self._elsewhere = elsewhere
        self._level = 0

    def value(
        self, title: str, look: Look, value: Any, names: CodeNames, read: set[str], depth: int
    ) -> None:
        """Note a value, and go on to what can be read of it.

        Args:
            title: Its name for messages.
            look: Finds it again.
            value: What it finds now.
            names: Of the code that reads it.
            read: Attributes that are read of it.
            depth: How deep in an installed package.
        """
        if value is MISSING or (depth and not _is_simple(value)):
            return
        if isinstance(value, types.ModuleType):
            self.module(title, value, names, read, depth)
            return
        place = self.place(title, look, value)
        num_before = len(self.places)
        self.inside(title, value, names, read, depth)
        if place is not None and len(self.places) == num_before:
            place.is_exact = True  # nothing in it tells it from another one

    def inside(self, title: str, value: Any, names: CodeNames, read: set[str], depth: int) -> None:
        """Go on to what can be read of a value, without a note which object it is."""
        if isinstance(value, nn.Module):
            self.modules.setdefault(id(value), value)
        if is_plain(value) or isinstance(value, (nn.Module, Tensor)) or self._level > _MAX_LEVEL:
            return
        if not self.is_new("in", value, *sorted(read)):
            return
        self._level += 1
        if isinstance(value, np.ndarray):
            if value.dtype != object and value.size <= _MAX_COPIED:
                self.live(f"the values of {title}", value)
        elif isinstance(value, contextvars.ContextVar):
            look = functools.partial(content_of, value, "value")
            self.value(f"the value of {title}", look, look(), names, read, depth)
        elif isinstance(value, (*CONTAINERS, tuple)):
            self._container(title, value, names, read, depth)
        elif isinstance(value, types.FunctionType):
            table = vars(value)
            for name in sorted(read & table.keys()):
                look = functools.partial(dict.get, table, name, MISSING)
                self.value(f"{name!r} of {title}", look, table[name], names, set(), depth)
            self.later.append((value, None, depth))
        elif isinstance(value, _CALLABLES):
            self.later.append((value, None, depth))
        elif isinstance(value, type):
            self._class(form_of(title), value, names, read, depth)
        else:
            self.attributes(form_of(title), value, names, read | _SPECIAL, depth)
        self._level -= 1

    def module(
        self, title: str, module: types.ModuleType, names: CodeNames, read: set[str], depth: int
    ) -> None:
        """Go on to what is read of a Python module; of libraries, to their functions alone."""
        table = vars(module)
        file = getattr(module, "__file__", None) or "<"
        if not is_users_file(file) or (is_installed_file(file) and depth >= MAX_INSTALLED_DEPTH):
            self.functions(module, read)
            return
        for name in sorted(read & table.keys()):
            look = functools.partial(dict.get, table, name, MISSING)
            inner = names.read_behind(name, self._elsewhere)
            self.value(f"{name!r} of {title}", look, table[name], names, inner, depth)

    def functions(self, module: types.ModuleType, read: Iterable[str]) -> None:
        """Note functions that are read of a Python module, to be compared by identity."""
        table = vars(module)
        for name in sorted(read):
            if isinstance(table.get(name), _SIMPLE_FUNCTIONS):
                look = functools.partial(dict.get, table, name, MISSING)
                self.place(f"function {name!r} of {module.__name__}", look, look())

    def attributes(
        self, form: Form, owner: object, names: CodeNames, read: Iterable[str], depth: int
    ) -> None:
        """Go on to attributes of an object, which may be in it, or in its class."""
        if isinstance(owner, type):
            self._class(form, owner, names, set(read), depth)
        elif not is_foreign(type(owner)):
            for name in sorted(_asked(read)):
                self._attribute(form, owner, name, names, depth)

    def _attribute(
        self, form: Form, owner: object, name: str, names: CodeNames, depth: int
    ) -> None:
        own = getattr(owner, "__dict__", {})
        base = next((base for base in type(owner).__mro__ if name in vars(base)), None)
        member = None if base is None else vars(base)[name]
        read = names.read_behind(name, self._elsewhere)
        if isinstance(own, dict) and name in own and not isinstance(member, property):
            look = functools.partial(dict.get, own, name, MISSING)
            self.value(form(name), look, own[name], names, read, depth)
        elif base is not None and function_of(member) is not None:
            if not is_foreign(base):
                self._method(base, name, member, (owner, form), depth)
        elif name not in _SPECIAL and not isinstance(member, _BUILT_IN):
            look = functools.partial(getattr, owner, name, MISSING)
            try:
                found = look()
            except Exception:  # of the user's own __getattr__
                return
            if base is not None or is_plain(found):
                self.value(form(name), look, found, names, read, depth)
            elif found is not MISSING:  # made up by __getattr__, maybe another one each time
                read = names.after.get(name, set()) - names.stored
                self.inside(form(name), found, names, read, depth)

    def _container(
        self, title: str, value: Any, names: CodeNames, read: set[str], depth: int
    ) -> None:
        if len(value) > _MAX_COPIED:
            look = functools.partial(length_of, value, "length")
            self.place(f"the length of {title}", look, look())
            return
        is_dict = isinstance(value, dict)
        pairs = list(dict.items(value)) if is_dict else list(enumerate(value))
        holds_tensors = is_dict and any(isinstance(item, Tensor) for _, item in pairs)
        if not holds_tensors and not isinstance(value, tuple):
            self.live(f"the items of {title}", value)
        for key, item in pairs[:_MAX_VISITED]:
            inner = f"{key!r} of {title}"
            if holds_tensors and isinstance(item, Tensor):  # a cache may get more of them
                self.place(inner, functools.partial(dict.get, value, key, item), item)
            elif not isinstance(item, types.ModuleType):
                self.inside(inner, item, names, read | (names.attributes - names.stored), depth)

    def _class(self, form: Form, kind: type, names: CodeNames, read: set[str], depth: int) -> None:
        special = _SPECIAL | _OF_NEW
        if issubclass(kind, torch.autograd.Function):
            special |= _OF_AUTOGRAD
        for name in sorted(_asked(read) | special):
            base = next((base for base in kind.__mro__ if name in vars(base)), None)
            if base is None or is_foreign(base) or isinstance(vars(base)[name], _BUILT_IN):
                continue
            if function_of(vars(base)[name]) is not None:
                self._method(base, name, vars(base)[name], None, depth)
                continue
            look = functools.partial(getattr, kind, name, MISSING)
            inner = names.read_behind(name, self._elsewhere)
            self.value(form(name), look, getattr(kind, name, MISSING), names, inner, depth)

    def _method(
        self, base: type, name: str, member: object, owner: Owner | None, depth: int
    ) -> None:
        function = function_of(member)
        if isinstance(function, types.FunctionType):
            if is_users_file(function.__code__.co_filename):
                look = functools.partial(member_of, base, name)
                self.place(f"{base.__qualname__}.{name}", look, member)
            self.later.append((function, owner, depth))


def _asked(names: Iterable[str]) -> set[str]:
    """Leave out names of Python's own, such as ``__dict__`` and ``__class__``."""
    return {name for name in names if name in _SPECIAL or not name.startswith("__")}


def _is_simple(value: object) -> bool:
    """Tell whether a value of an installed package counts; its objects and caches are its own."""
    if isinstance(value, dict):
        return all(map(is_plain, dict.values(value)))
    simple = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, functools.partial)
    return value is not None and (is_plain(value) or isinstance(value, simple))


def is_foreign(kind: type) -> bool:
    """Tell whether a class is torch's, ours, or every object's."""
    return f"{kind.__module__}.".startswith(_OF_NO_INTEREST) or kind is object


def form_of(title: str, prefix: str = "") -> Form:
    """Return what makes titles of attributes of something with a title."""
    return lambda name: f"{prefix}{name!r} of {title}"


def function_of(member: object) -> object | None:
    """Return the function of a member of a class, if it is a function of some kind."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, functools.cached_property):
        return member.func
    is_wrapper = callable(getattr(member, "__wrapped__", None))
    return member if isinstance(member, types.FunctionType) or is_wrapper else None


def member_of(kind: type, name: str) -> Any:
    """Return what a class itself has under a name."""
    return vars(kind).get(name, MISSING)


def content_of(variable: contextvars.ContextVar[Any], _: str) -> Any:
    """Return what a context variable holds here."""
    try:
        return variable.get()  # a default that is given here would hide the variable's own
    except LookupError:
        return None


def length_of(items: Sized, _: str) -> int:
    """Return how many items a container has."""
    return len(items)


def item_of(items: Sequence[Any], index: int) -> Any:
    """Return an item."""
    return items[index]
