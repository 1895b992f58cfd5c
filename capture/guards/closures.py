"""Guard of what the user's functions take from around them.

Seen is what ``inspect.getclosurevars`` gives for the loss function, the hooks, the ``forward`` of
users' classes, and the users' functions that these name: plain values, functions, and what
containers and objects hold, of objects what the code reads by name.
"""

import contextvars
import functools
import inspect
import operator
import os
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.asks import (
    CONTAINERS,
    FUNCTIONS,
    Ask,
    Place,
    Places,
    change_of,
    copy_of,
    is_plain,
    same,
)
from graphfsdp._capture.guards.modules import is_named, join
from graphfsdp._capture.guards.reads import Reads
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp._capture.trace.reach import (
    MISSING,
    OWN,
    called_instead,
    functions_of,
    loaded,
    special_methods,
    without_tensors,
)
from graphfsdp._capture.trace.source import file_of, is_installed_file, is_users_file
from graphfsdp.base.changes import Change

_MAX_ITEMS = 10_000
_MAX_OBJECTS = 1_000  # in one container
_MAX_FUNCTIONS = 1_000
_MAX_DEPTH = 4
_SIMPLE_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class _Search:
    """Finds everything that is in the bound that this module names."""

    def __init__(self, known: dict[types.CodeType, Reads], handed: set[str]) -> None:
        """``handed`` is what any function reads of its arguments; what is found is added to it."""
        self.found = Places(_remedy)
        self._known = known
        self._handed = handed
        self._seen: set[tuple[object, ...]] = set()
        self._alive: list[object] = []  # whose ids are in there
        # Functions, with the object that each belongs to, and what that is called.
        self._named: list[tuple[Any, Any, str]] = []

    def search(
        self,
        functions: Iterable[Any],
        kinds: Iterable[type[nn.Module]],
        modules: Iterable[tuple[str, nn.Module]],
    ) -> Places:
        """Return all places around functions, and around the forward of classes of modules."""
        for function in functions:
            self._function(function, None)
        for kind in kinds:
            self._function(kind.forward, kind)
        for path, module in modules:
            self._objects_of(path, module)
        num_near = len(self._named)
        for index, (function, owner, title) in enumerate(self._named):  # which grows meanwhile
            if index < num_near or (index < _MAX_FUNCTIONS and not _is_of_a_library(function)):
                self._function(function, owner, title)
        return self.found

    def _objects_of(self, path: str, module: nn.Module) -> None:
        """Look at objects that a module holds, and that are more than data."""
        code = getattr(type(module).forward, "__code__", None)
        reads = self._known.get(code) if isinstance(code, types.CodeType) else None
        if reads is None:
            return
        table = vars(module)
        for name in sorted(reads.deeper & table.keys() - OWN):
            value = table[name]
            if isinstance(value, (*FUNCTIONS, Tensor, nn.Module)) or is_plain(value):
                continue
            title = f"attribute {join(path, name)!r}"
            deeper = self._deeper_of(reads)
            if isinstance(value, (*CONTAINERS, tuple)):
                self._objects_in(title, value, deeper, 0)
            elif not is_named(value):
                self._variable(title, table, name, value, deeper, deeper=deeper)

    def _function(self, function: Any, owner: Any, title: str = "") -> None:
        """Look around a function; its owner is an object, or a class of modules, or None."""
        if isinstance(function, functools.partial):
            read = self._reads_of(function.func)
            for given, kind in (
                (dict(enumerate(function.args)), "argument"),
                (function.keywords, "keyword"),
            ):
                for key, value in given.items():
                    what = f"{kind} {key!r} of a functools.partial"
                    self._variable(what, given, key, value, read, (), read)
        elif isinstance(function, types.MethodType):
            owner = function.__self__
        elif isinstance(function, types.FunctionType):
            self._code(function, owner, title)
        elif isinstance(function, types.BuiltinMethodType):
            if not isinstance(function.__self__, (types.ModuleType, type, Tensor, nn.Module)):
                self._contents(f"what {title} belongs to", function.__self__, set(), set(), 0)
        elif callable(function):
            call: object = type(function).__call__
            if isinstance(call, types.FunctionType):
                self._code(call, function, title)
        registry = getattr(function, "registry", None)  # of functools.singledispatch
        if isinstance(registry, types.MappingProxyType):
            called = getattr(function, "__qualname__", title)
            self._look(f"what is registered for {called}", registry)
        for inner in called_instead(function):
            if self._is_new("inner", inner, owner):
                self._function(inner, owner, title)

    def _reads(self, code: types.CodeType) -> Reads:
        if code not in self._known:
            self._known[code] = Reads()
            self._known[code].add(code)
        return self._known[code]

    def _deeper_of(self, reads: Reads, texts: Iterable[str] = ()) -> AbstractSet[str]:
        """Return what code may read of what an object holds, by itself or where it hands that.

        ``texts`` are names that it may look up by.
        """
        by_text = set(texts) if reads.takes_apart else set()
        return reads.deeper | ((self._handed | by_text) - reads.stored)

    def _reads_of(self, function: Any) -> AbstractSet[str]:
        """Return what a function may read of what it is given."""
        function = inspect.unwrap(function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if not isinstance(code, types.CodeType) or not is_users_file(code.co_filename):
            return frozenset()
        return self._deeper_of(self._reads(code))

    def _code(self, function: types.FunctionType, owner: Any, title: str) -> None:
        is_users = is_users_file(function.__code__.co_filename)
        if not is_users or not self._is_new("code", function, owner):
            return
        reads = self._reads(function.__code__)
        self._handed |= reads.of_arguments(function.__code__)
        where = f"of {function.__qualname__}"
        table = function.__globals__
        freevars = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = {
            name: Place(f"closure variable {name!r} {where}", cell, "cell_contents", None)
            for name, cell in freevars
        }
        near = [place.look() for place in cells.values()]
        near += [table.get(name) for name in reads.globals]
        deeper = self._deeper_of(reads, (each for each in near if isinstance(each, str)))
        self._note(f"the code {where}", function, "__code__", function.__code__)
        if function.__defaults__ is not None:
            defaults = function.__defaults__
            self._note(f"the default arguments {where}", function, "__defaults__", defaults)
            for value in defaults:
                what = f"a default argument {where}"
                self._contents(what, value, deeper, deeper, 0)
        for key, value in (function.__kwdefaults__ or {}).items():
            what = f"default of {key!r} {where}"
            self._variable(what, function.__kwdefaults__, key, value, deeper, (), deeper)
        for name in sorted(cells.keys() - reads.stored):
            at, read = cells[name], reads.of(name, deeper)
            self._variable(at.title, at.holder, at.key, at.look(), read, reads.texts, deeper)
        found = reads.globals | (reads.texts if "globals" in reads.globals else set())
        for name in sorted((found - reads.stored) & table.keys()):
            what = f"global variable {name!r} of {function.__module__}"
            read = reads.of(name, deeper)
            self._variable(what, table, name, table[name], read, reads.texts, deeper)
        by_text = reads.texts if "modules" in reads.attributes else set()  # of sys
        for name, module in loaded(by_text | reads.imports):
            self._module(f"module {name!r}", module, reads.attributes, reads.attributes)
        if {"environ", "getenv"} & (reads.attributes | reads.globals):
            environ: Any = os.environ
            for name in sorted(reads.texts):
                key = environ.encodekey(name)
                value = environ._data.get(key, MISSING)
                self._note(f"environment variable {name!r}", environ._data, key, value)
        if owner is not None and function.__code__.co_argcount:

            def titled(name: str) -> str:
                return f"{name!r} of {title}" if title else f"attribute {name!r} {where}"

            read = reads.of(function.__code__.co_varnames[0], deeper)
            self._attributes(owner, "", titled, read, deeper)

    def _attributes(
        self,
        owner: Any,
        title: str,
        titled: Callable[[str], str],
        read: AbstractSet[str],
        deeper: AbstractSet[str],
        depth: int = 0,
    ) -> None:
        """Look at what is read of an object: what it holds, and what its class gives it.

        Attributes of modules are none of this guard's, but for their methods.
        """
        kind = owner if isinstance(owner, type) else type(owner)
        is_module = issubclass(kind, nn.Module)
        own = None if is_module or owner is kind else _attributes_of(owner)
        for name in sorted(read):
            if own is not None and name in own:
                self._variable(titled(name), own, name, own[name], deeper, (), deeper, depth)
            elif not is_module and _holds_elsewhere(owner, name):
                held = getattr(owner, name, MISSING)
                self._variable(titled(name), owner, name, held, deeper, (), deeper, depth)
            else:
                bases = (*kind.__mro__, *(type(kind).__mro__ if owner is kind else ()))
                base = next((base for base in bases if name in vars(base)), object)
                if own is not None and name in vars(base):
                    # What an object gets of its own comes before what its class has.
                    self._note(titled(name), own, name, MISSING)
                self._of_class(owner, base, name, title, deeper, depth)

    def _of_class(
        self, owner: Any, base: type, name: str, title: str, deeper: AbstractSet[str], depth: int
    ) -> None:
        member = vars(base).get(name)
        where = f"{base.__qualname__}.{name}"
        functions = functions_of(member)
        for function in functions:
            code = getattr(inspect.unwrap(function), "__code__", None)
            if isinstance(code, types.CodeType) and is_users_file(code.co_filename):
                self._note(where, vars(base), name, member)
                self._named.append(
                    (function, None if isinstance(member, staticmethod) else owner, title)
                )
        if functions or member is None:
            return
        is_data = isinstance(member, (Tensor, *CONTAINERS)) or is_plain(member)
        if is_data or not (_is_of_a_library(base) or hasattr(type(member), "__get__")):
            self._variable(where, vars(base), name, member, deeper, (), deeper, depth)
        elif hasattr(type(member), "__get__") and not _is_of_a_library(type(member)):
            self._contents(where, member, deeper, deeper, depth)

    def _variable(
        self,
        title: str,
        holder: Any,
        key: Any,
        value: Any,
        read: AbstractSet[str],
        texts: Collection[str] = (),
        deeper: AbstractSet[str] = frozenset(),
        depth: int = 0,
    ) -> None:
        """Note a variable, and what it holds: ``read`` of it, ``deeper`` of what that holds."""
        # The attributes of a class are another object each time that somebody asks for them.
        at = title if isinstance(holder, types.MappingProxyType) else holder
        if value is MISSING or not self._is_new(
            "variable", at, repr(key), *sorted(read), *sorted(texts)
        ):
            return
        if isinstance(value, types.ModuleType):
            self._module(title, value, read, deeper)
            return
        self._note(title, holder, key, value)
        if isinstance(value, torch.optim.Optimizer) and "param_groups" in read:
            for index, group in enumerate(value.param_groups):
                for name in sorted(set(texts) & group.keys() - {"params"}):
                    self._note(f"{name!r} of group {index} of {title}", group, name, group[name])
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and "get_last_lr" in read:
            read = read | {"_last_lr"}
        if depth <= _MAX_DEPTH:
            self._contents(title, value, read, deeper, depth)

    def _contents(
        self, title: str, value: Any, read: AbstractSet[str], deeper: AbstractSet[str], depth: int
    ) -> None:
        """Note the items of a container, and what is read of an object."""
        if isinstance(value, weakref.ref):
            value = value()
        if isinstance(value, contextvars.ContextVar):
            self._look(f"the value of {title}", value)
            return
        if isinstance(value, operator.attrgetter):
            paths: Any = value.__reduce__()[1]
            self._handed |= {name for path in paths for name in path.split(".")}
        if callable(value) and not isinstance(value, (type, Tensor, nn.Module)):
            self._named.append((value, None, title))
        if isinstance(value, (types.MappingProxyType, ChainMap)):  # of dicts that others hold
            self._look(f"the items of {title}", value)
            self._objects_in(title, dict(value), deeper, depth)
            return
        is_class = isinstance(value, type)
        is_function = is_class and issubclass(value, torch.autograd.Function)
        if not (is_class or isinstance(value, (Tensor, nn.Module))) or is_function:
            for base, name in special_methods(value if is_function else type(value)):
                if not _is_of_a_library(base):
                    self._of_class(value, base, name, title, deeper, depth)
        value = value.data if isinstance(value, (UserDict, UserList)) else value
        if isinstance(value, tuple) and not is_plain(value):
            self._objects_in(title, value, deeper, depth)
        if isinstance(value, CONTAINERS):
            self._items(title, value)
            self._objects_in(title, value, deeper, depth)
        elif not is_plain(value) and not isinstance(value, (Tensor, nn.Module)):
            self._attributes(
                value, title, lambda name: f"{name!r} of {title}", read, deeper, depth + 1
            )

    def _objects_in(self, title: str, live: Any, read: AbstractSet[str], depth: int) -> None:
        if len(live) > _MAX_OBJECTS or depth >= _MAX_DEPTH:
            return
        names = sorted(read)
        for key, item in list(dict.items(live) if isinstance(live, dict) else enumerate(live)):
            is_data = is_plain(item) or isinstance(item, (Tensor, nn.Module))
            if not is_data and self._is_new("inside", item, *names):
                self._contents(f"{key!r} of {title}", item, read, read, depth + 1)

    def _module(
        self,
        title: str,
        module: types.ModuleType,
        read: AbstractSet[str],
        deeper: AbstractSet[str],
    ) -> None:
        """Look at what is read of a Python module, or of one in it; of others only functions."""
        if not self._is_new("module", module, *sorted(read)):
            return
        is_users, table = is_users_file(file_of(module)), vars(module)
        for name in sorted(read & table.keys()):
            value, what = table[name], f"{name!r} of {title}"
            if isinstance(value, _SIMPLE_FUNCTIONS):
                what = f"function {name!r} of {module.__name__}"
            if isinstance(value, types.ModuleType):
                self._module(f"module {value.__name__!r}", value, deeper, deeper)
            elif is_users:
                self._variable(what, table, name, value, deeper, (), deeper)
            elif isinstance(value, _SIMPLE_FUNCTIONS):
                self._note(what, table, name, value)

    def _items(self, title: str, live: Any) -> None:
        if len(live) > _MAX_ITEMS:
            self._look(f"the length of {title}", partial(len, live))
            return
        items = dict.values(live) if isinstance(live, dict) else live
        if not any(isinstance(item, Tensor) for item in items):
            self._look(f"the items of {title}", live)
        elif isinstance(live, dict):  # a cache may get more of them
            for key, item in dict.items(live):
                self._note(f"{key!r} of {title}", live, key, item)

    def _note(self, title: str, holder: Any, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            if value.dtype != object and value.size <= _MAX_ITEMS:
                self._look(f"the values of {title}", value)
            return
        at = title if isinstance(holder, types.MappingProxyType) else holder  # another each time
        if self._is_new("place", at, repr(key)):
            self.found.add(Place(title, holder, key, value))

    def _look(self, title: str, live: Any) -> None:
        """Note what something holds or tells, by looking at it; see ``copy_of``."""
        if self._is_new("place", live):
            self.found.add(Place(title, None, None, copy_of(live), live))

    def _is_new(self, what: str, *parts: object) -> bool:
        key = (what, *(part if isinstance(part, str) else id(part) for part in parts))
        self._alive.extend(parts)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _is_of_a_library(thing: Any) -> bool:
    if isinstance(thing, types.BuiltinMethodType) and not isinstance(
        thing.__self__, types.ModuleType
    ):
        return False  # it is as near as what it belongs to
    kind = thing if isinstance(thing, (type, types.FunctionType)) else type(thing)
    name = getattr(thing, "__module__", None) or kind.__module__
    file = file_of(sys.modules.get(name))
    return name != "functools" and (not is_users_file(file) or is_installed_file(file))


def _holds_elsewhere(owner: Any, name: str) -> bool:
    """Tell whether an attribute lies in a slot, of this thread, or in what a proxy stands for."""
    is_slot = isinstance(getattr(type(owner), name, None), types.MemberDescriptorType)
    return is_slot or isinstance(owner, (threading.local, *weakref.ProxyTypes))


def _attributes_of(owner: Any) -> Mapping[str, Any] | None:
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found


class Closures:
    """Searches around the functions of an iteration."""

    def __init__(self, functions: Sequence[Callable[..., Any]], model: nn.Module) -> None:
        """Prepare.

        Args:
            functions: The loss function, or the user's iteration, and hooks.
            model: The model.
        """
        self._functions = functions
        self._model = model
        self._known: dict[types.CodeType, Reads] = {}
        self._handed: set[str] = set()

    def find(self, outside: Iterable[nn.Module] = ()) -> dict[str, Place]:
        """Return all places by title; also around modules that are none of the model's."""
        kinds = dict.fromkeys(map(type, (*self._model.modules(), *outside)))
        while True:
            num_handed = len(self._handed)
            search = _Search(self._known, self._handed)
            found = search.search(self._functions, kinds, self._model.named_modules())
            # A function that was met late may read more of what was handed to it before.
            if len(self._handed) == num_handed:
                return found.places

    def values(self, outside: Iterable[nn.Module] = ()) -> dict[str, object]:
        """Return all values by title; a tensor that the iteration drops must not live here."""
        found = self.find(outside).items()
        return {title: without_tensors(place.value) for title, place in found}


class ClosureGuard:
    """Notices what changed around functions.

    What the recorded iteration has changed itself, it counts or logs; a replay leaves it. A
    configuration may be replaced by an equal one: places are compared by their titles.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, Place]],
        before: Mapping[str, object],
        log: AttributeLog,
        was_read: Callable[[Tensor], bool],
    ) -> None:
        """Remember everything now.

        Args:
            find: Finds all places.
            before: The values before the recording, from ``Closures.values``.
            log: What the recorded iteration has read of modules.
            was_read: Tells whether the recording has touched a tensor's storage.
        """

        def is_used(value: object) -> bool:
            if isinstance(value, Tensor):
                return was_read(value)
            return bool(log.names_read(value)) if isinstance(value, nn.Module) else True

        self._find = find
        used = {
            title: place
            for title, place in find().items()
            if is_used(place.value) and same(before.get(title, MISSING), place.value)
        }
        self.places = Places(_remedy, used)

    def asks(self) -> Iterator[Ask]:
        """Yield one question for each way to look."""
        return self.places.asks()

    def changes(self) -> list[Change]:
        """Compare each place and name what has changed."""
        now, places = self._find(), self.places.places
        gone = [title for title in places if title not in now]
        found = [
            change_of(title, place.value, now[title].value, _remedy)
            for title, place in places.items()
            if title in now and not same(place.value, now[title].value)
        ]
        found = found or [
            change_of(title, places[title].value, MISSING, _remedy)
            for title in gone
            if not isinstance(places[title].value, Tensor)
        ]
        if not found:
            self.places.places = {title: now[title] for title in places if title in now}
        return found


def _remedy(old: object) -> str:
    if isinstance(old, Tensor):
        return "write new values into the old tensor (copy_, fill_), which replays see"
    if isinstance(old, nn.Module):
        return "replace modules before the capture, or load weights in place (load_state_dict)"
    if isinstance(old, (*FUNCTIONS, types.CodeType)):
        return "replace functions before the capture, and leave them so"
    return (
        "pass what changes as a tensor of the batch, or hold it in a tensor and write into that "
        "(fill_), which replays see"
    )
