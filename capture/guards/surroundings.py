"""Finds what the user's functions read around them: globals, closures, objects, their methods."""

import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from graphfsdp._capture.guards.modules import OWN
from graphfsdp._capture.guards.surrounding_objects import (
    MAX_INSTALLED_DEPTH,
    ObjectSearch,
    Owner,
    form_of,
    function_of,
    is_foreign,
    item_of,
    member_of,
)
from graphfsdp._capture.guards.surrounding_values import MISSING
from graphfsdp._capture.trace.code_names import CodeNames, names_of
from graphfsdp._capture.trace.source import is_installed_file, is_users_file

_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*")
_ASK_ENVIRONMENT = frozenset({"environ", "getenv"})

KnownNames = dict[types.CodeType, CodeNames]


class Search(ObjectSearch):
    """Walks from functions to all that their code may read, by name.

    Note [Surroundings]: a recording has every Python value baked in that the iteration has read.
    Of modules each read is noted (``attribute_log.py``); elsewhere Python tells nobody. So the code
    of functions is looked at: which globals and closure variables it reads, which attributes of
    these, of its own object, and of what it finds there; and so on for each function, method,
    property and class of the user's that it comes to. What an object that is handed on is asked
    for is what any of these functions reads. Titles are made of the way that leads to a value,
    so a second search, after something was replaced, finds the same values at the same titles.

    Attributes:
        names: All names in all code that was come to.
        reached: The functions, with the object whose method each is.
    """

    def __init__(self, elsewhere: set[str], known: KnownNames) -> None:
        """Begin.

        Args:
            elsewhere: All attributes that the functions read, as an earlier search has found them.
            known: Names in code that searches have looked at; this one adds to them.
        """
        super().__init__(elsewhere)
        self.names = CodeNames()
        self.reached: list[tuple[types.FunctionType, object]] = []
        self._known = known

    def of_function(self, function: Callable[..., Any]) -> None:
        """Find what is around a function, or another object that can be called."""
        self.later.append((function, None, 0))
        self._go_on()

    def of_classes(self, kinds: Iterable[type[nn.Module]]) -> None:
        """Find what is around the modules' forward, and around their methods that are named."""
        kinds, before = dict.fromkeys(kinds), -1
        while self.num_seen != before:
            before = self.num_seen
            kinds |= dict.fromkeys(map(type, list(self.modules.values())))
            for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
                for name, member in list(vars(base).items()):
                    if name == "forward" or name in self.names.attributes:
                        self._method_of_modules(base, name, member, base in kinds)
            self._go_on()

    def of_attribute(self, title: str, table: dict[str, Any], name: str, *, inside: bool) -> None:
        """Find what can be read of an attribute of a module.

        Args:
            title: Its name for messages.
            table: The module's attributes.
            name: Which one.
            inside: Leave out which object it is.
        """
        value = table[name]
        read = self.names.read_behind(name, self._elsewhere)
        if inside:
            self.inside(title, value, self.names, read, 0)
        else:
            look = functools.partial(dict.get, table, name, MISSING)
            self.value(title, look, value, self.names, read, 0)
        self._go_on()

    def of_class_attributes(self, kind: type[nn.Module]) -> None:
        """Find what can be read of attributes that a class of modules has, not its instances."""
        own = {name for base in kind.__mro__ if not is_foreign(base) for name in vars(base)}
        for name in sorted(own & self.names.attributes - OWN):
            value = getattr(kind, name, MISSING)
            if isinstance(inspect.getattr_static(kind, name, None), classmethod):
                continue  # it is bound anew each time; ``of_classes`` has it as a method
            if function_of(value) is None and not isinstance(value, type | property):
                look = functools.partial(getattr, kind, name, MISSING)
                read = self.names.read_behind(name, self._elsewhere)
                self.value(f"{kind.__name__}.{name}", look, value, self.names, read, 0)
        self._go_on()

    def _go_on(self) -> None:
        """Look into the functions that were found; no recursion, for chains of calls are long."""
        while self.later:
            self._function(*self.later.pop(0))

    def _function(self, function: Any, owner: Owner | None, depth: int) -> None:
        if isinstance(function, functools.partial):
            self._partial(function, owner, depth)
            return
        if isinstance(function, types.MethodType):
            inner = getattr(function.__func__, "__qualname__", "a method")
            owner = owner or (function.__self__, form_of(inner, "attribute "))
        function = getattr(function, "__func__", function)
        wrapped = getattr(function, "__wrapped__", None)
        if callable(wrapped) and self.is_new("wrapped", function):
            self.later.append((wrapped, owner, depth))
        if isinstance(function, types.FunctionType):
            file = function.__code__.co_filename
            depth = depth + 1 if is_installed_file(file) else 0
            if is_users_file(file) and depth <= MAX_INSTALLED_DEPTH:
                self._code(function, owner, depth)
        elif not isinstance(function, type | types.BuiltinFunctionType) and callable(function):
            kind = type(function)
            call = getattr(kind.__call__, "__qualname__", kind.__qualname__)
            self.attributes(form_of(call, "attribute "), function, self.names, ["__call__"], depth)

    def _partial(self, function: functools.partial[Any], owner: Owner | None, depth: int) -> None:
        for index, value in enumerate(function.args):
            look = functools.partial(item_of, function.args, index)
            title = f"argument {index} of a functools.partial"
            self.value(title, look, value, self.names, self._elsewhere, depth)
        for key, value in function.keywords.items():
            look = functools.partial(dict.get, function.keywords, key, MISSING)
            title = f"keyword {key!r} of a functools.partial"
            self.value(title, look, value, self.names, self._elsewhere, depth)
        self.later.append((function.func, owner, depth))

    def _method_of_modules(self, base: type, name: str, member: object, is_used: bool) -> None:
        function = function_of(member)
        if base is nn.Module or not isinstance(function, types.FunctionType):
            return
        is_users = is_users_file(function.__code__.co_filename)
        is_torchs = base.__module__.startswith("torch.nn.modules.")
        if not (is_users or is_torchs) or not self.is_new("method", base, name):
            return
        if not is_users:
            names = self._names_of(function)
            for each in sorted(names.globals.keys() & function.__globals__.keys()):
                value = function.__globals__[each]
                if isinstance(value, types.ModuleType):
                    self.functions(value, names.read_of(each, names.globals))
            return
        if name != "forward" or not is_used:  # ValueGuard has that of modules' own classes
            look = functools.partial(member_of, base, name)
            self.place(f"{base.__qualname__}.{name}", look, member)
        self.later.append((function, (None, form_of(base.__qualname__)), 0))

    def _names_of(self, function: types.FunctionType) -> CodeNames:
        if function.__code__ not in self._known:
            self._known[function.__code__] = names_of(function)
        names = self._known[function.__code__]
        self.names.merge(names)
        return names

    def _code(self, function: types.FunctionType, owner: Owner | None, depth: int) -> None:
        if not self.is_new("code", function, None if owner is None else owner[0]):
            return
        self.reached.append((function, None if owner is None else owner[0]))
        names = self._names_of(function)
        where = f"of {function.__qualname__}"
        self._look_at_defaults(function, names, where, depth)
        if owner is not None and not isinstance(owner[0], nn.Module | None):
            read = names.read_of_self(function, self._elsewhere)
            self.attributes(owner[1], owner[0], names, read, depth)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            look = functools.partial(getattr, cell, "cell_contents")
            if name not in names.stored and _has_contents(cell):
                read = names.read_of(name, names.closures, self._elsewhere)
                title = f"closure variable {name!r} {where}"
                self.value(title, look, look(), names, read, depth)
        table = function.__globals__
        for name in sorted((names.globals.keys() - names.stored) & table.keys()):
            read = names.read_of(name, names.globals, self._elsewhere)
            look = functools.partial(dict.get, table, name, MISSING)
            title = f"global variable {name!r} of {function.__module__}"
            self.value(title, look, table[name], names, read, depth)
        for name in sorted(names.imports & sys.modules.keys()):
            self.module(f"module {name!r}", sys.modules[name], names, names.attributes, depth)
        if _ASK_ENVIRONMENT & (names.attributes | names.globals.keys()):
            for name in filter(_ENVIRONMENT.fullmatch, sorted(names.constants)):
                look = functools.partial(os.environ.get, name)
                self.place(f"environment variable {name!r}", look, look())

    def _look_at_defaults(
        self, function: types.FunctionType, names: CodeNames, where: str, depth: int
    ) -> None:
        for name, words in (("__code__", "the code"), ("__defaults__", "the default arguments")):
            look = functools.partial(getattr, function, name)
            if look() is not None:
                self.value(f"{words} {where}", look, look(), names, set(), depth)
        for key, value in (function.__kwdefaults__ or {}).items():
            look = functools.partial(dict.get, function.__kwdefaults__, key, MISSING)
            self.value(f"default of {key!r} {where}", look, value, names, set(), depth)


def _has_contents(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:  # nothing has been assigned to it yet
        return False
