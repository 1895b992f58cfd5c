"""Python that an iteration can name: its numbers, strings and containers, and who holds them.

The reach is bounded: what the user's functions name (globals, closures, defaults), the attributes
of modules, of users' objects and classes, and what containers hold, down to ``_MAX_DEPTH``. Code of
installed packages is followed for ``_MAX_FAR`` calls. Left out is what torch and graphfsdp keep.
"""

import collections
import contextvars
import enum
import functools
import random
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp._capture.python import held
from graphfsdp._capture.python.clocks import CLOCKS
from graphfsdp._capture.python.places import Place, Snapshot
from graphfsdp._capture.trace.reach import (
    INDIRECT,
    MISSING,
    OWN,
    SCALARS,
    VALUES,
    called_instead,
    functions_of,
    is_called_by_itself,
    loaded,
    names_in,
    numbers_in,
)
from graphfsdp._capture.trace.source import file_of, is_installed_file, is_users_file
from graphfsdp.base.torch_internals import buffers_of, children_of, parameters_of

_MAX_DEPTH = 12
_MAX_FAR = 2
_MAX_ITEMS = 10_000  # of longer containers, only the length is looked at
_MAX_PLACES = 100_000
_MAX_BYTES = 1 << 20  # of an array
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.Optimizer)
# Objects of these are the machinery of Python.
_MACHINERY = frozenset(
    {
        *("_io", "_pytest", "_thread", "_weakref", "asyncio", "concurrent", "importlib", "io"),
        *("logging", "multiprocessing", "pathlib", "re", "socket", "subprocess", "threading"),
        "weakref",
    }
)
_NO_SLOTS = frozenset({"__dict__", "__weakref__"})
# Counts of torch's optimizers and schedulers that no iteration reads.
_COUNTS = frozenset({"_step_count", "_opt_called", "_is_initial", "_get_lr_called_within_step"})


def take_snapshot(
    model: nn.Module,
    functions: Iterable[Any],
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    weakly: bool = False,
) -> Snapshot:
    """Walk over everything in reach of an iteration; its own optimizers are watched elsewhere.

    ``weakly``: hold no tensor.
    """
    walk = _Walk(optimizers, Snapshot(weakly=weakly))
    walk.generator("random", random._inst)
    walk.generator("numpy.random", np.random.mtrand._rand)
    for path, module in model.named_modules():
        walk.module(f"model.{path}".rstrip("."), module, 0)
    for function in functions:
        walk.visit(getattr(function, "__name__", type(function).__name__), function)
    return walk.found


class _Walk:
    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], found: Snapshot) -> None:
        self.found = found
        self._alive: dict[int, Any] = {id(optimizer): optimizer for optimizer in optimizers}
        self._looks: dict[type, _Look | None] = {}  # asked once for each class and walk
        self._named: set[str] = set()  # by code
        self._asked: set[tuple[int, frozenset[str]]] = set()  # modules of Python, for these names
        self._unnamed: dict[str, list[tuple[Any, int, int]]] = {}
        # The same by the class that has them.
        self._unnamed_of: dict[str, list[tuple[Any, int, int]]] = {}

    def visit(
        self,
        name: str,
        value: Any,
        depth: int = 0,
        far: int = 0,
        holder: Any = None,
        key: Any = None,
    ) -> None:
        """Note a value, and what it holds."""
        kind = type(value)
        if kind in SCALARS:
            self.found.places[name] = Place(value, "value", holder, key)
            return
        if depth > _MAX_DEPTH or len(self.found.places) > _MAX_PLACES:
            return
        if isinstance(value, tuple):
            self._tuple(name, value, depth + 1, far, held.InTuple(holder, key))
            return
        if isinstance(value, (frozenset, *VALUES)):
            self.found.places[name] = Place(value, "value", holder, key)
            return
        self._clock(value, holder, key)
        if kind not in self._looks:
            self._looks[kind] = _look_of(kind)
        look = self._looks[kind]
        self.found.places.setdefault(name, Place(_called(value), "type"))
        if look is None:
            if issubclass(kind, Tensor):
                self._tensor(name, value, depth, far)
        elif id(value) not in self._alive:
            self._alive[id(value)] = value
            look(self, name, value, depth + 1, far)

    def _each(
        self, title: str, saved: Mapping[Any, Any], depth: int, far: int, holder: Any
    ) -> None:
        """Note what a holder has under names."""
        for key, value in saved.items():
            self.visit(f"{title}{key}", value, depth, far, holder, key)

    def _names(
        self, title: str, table: dict[str, Any], keys: Iterable[str], depth: int, far: int
    ) -> None:
        """Note a few entries of a dict that holds variables or attributes, but for modules."""
        saved = {key: table[key] for key in keys}
        if saved:
            self.found.hold(held.put_back_names, table, saved)
            for key, value in saved.items():
                if not isinstance(value, types.ModuleType):
                    self.visit(f"{title}{key}", value, depth, far, table, key)

    def _attributes(
        self, title: str, saved: dict[str, Any], depth: int, far: int, holder: Any
    ) -> None:
        """Note what lies in a cell, in a class, or in slots."""
        if saved:
            self.found.hold(held.put_back_attributes, holder, saved)
            there = {key: value for key, value in saved.items() if value is not MISSING}
            self._each(title, there, depth, far, holder)

    def _clock(self, value: Any, holder: Any, key: Any) -> None:
        is_known = isinstance(value, (types.BuiltinFunctionType, type)) and value in CLOCKS
        if is_known and holder is not None:
            self.found.clocks.append(Place(value, "clock", holder, key))

    def _length(self, name: str, value: Any, length: int) -> None:
        self.found.places[f"len({name})"] = Place(length, "length", value)

    def _tuple(
        self, name: str, value: tuple[Any, ...], depth: int, far: int, holder: held.InTuple
    ) -> None:
        fields = getattr(type(value), "_fields", None)
        for index, item in enumerate(value[:_MAX_ITEMS]):
            title = f"{name}.{fields[index]}" if fields else f"{name}[{index}]"
            self.visit(title, item, depth, far, holder, index)

    def mapping(self, name: str, value: dict[Any, Any], depth: int, far: int) -> None:
        items = dict(held.items_of(value))
        self._length(name, value, len(items))
        self.found.hold(held.put_back_dict, value, items)
        if len(items) > _MAX_ITEMS:
            return
        self.found.places[f"keys of {name}"] = Place(tuple(map(_plain_key, items)), "keys")
        for key, item in items.items():
            shown = repr(key) if type(key) in SCALARS else type(key).__name__
            self.visit(f"{name}[{shown}]", item, depth, far, value, key)

    def sequence(self, name: str, value: Any, depth: int, far: int) -> None:
        """Note a list or a deque."""
        self._length(name, value, len(value))
        self.found.hold(held.put_back_items, value, list(value))
        if len(value) <= _MAX_ITEMS:
            for index, item in enumerate(value):
                self.visit(f"{name}[{index}]", item, depth, far, value, index)

    def collection(self, name: str, value: set[Any], depth: int, far: int) -> None:
        """Note a set."""
        self._length(name, value, len(value))
        self.found.hold(held.put_back_set, value, set(value))
        if len(value) <= _MAX_ITEMS:
            self.found.places[f"keys of {name}"] = Place(frozenset(map(_plain_key, value)), "keys")

    def numbers(self, name: str, value: Any, depth: int, far: int) -> None:
        """Note an array, of NumPy or of Python, or a bytearray."""
        is_array = isinstance(value, np.ndarray)
        self._length(name, value, value.size if is_array else len(value))
        if is_array and (value.nbytes > _MAX_BYTES or value.dtype == object):
            return
        saved = value.copy() if is_array else value[:]
        self.found.hold(held.put_back_array, value, saved)
        as_array = saved if is_array else np.array(list(saved))
        self.found.places[name] = Place(as_array, "array", value)

    def box(self, name: str, value: Any, depth: int, far: int) -> None:
        """Note what lies in a cell or in a context variable."""
        is_cell = isinstance(value, types.CellType)
        try:
            content = value.cell_contents if is_cell else value.get()
        except (ValueError, LookupError):  # empty yet
            return
        self.found.hold(held.put_back_attributes, value, {"cell_contents": content})
        title = name if is_cell else f"{name}.get()"
        self.visit(title, content, depth, far, value, "cell_contents")

    def function(self, name: str, function: Any, depth: int, far: int) -> None:
        """Note what a function names: globals, closure, defaults, and its own attributes."""
        for inner in called_instead(function):
            self.visit(name, inner, depth, far)
        if isinstance(function, functools.partial):
            self.visit(f"{name}.args", function.args, depth, far)
            self.visit(f"{name}.keywords", function.keywords, depth, far)
        elif isinstance(function, types.MethodType):
            owner = function.__self__
            title = owner.__name__ if isinstance(owner, type) else type(owner).__name__
            self.visit(title, owner, depth, far)
        elif isinstance(function, types.BuiltinFunctionType):
            owner = function.__self__
            if not isinstance(owner, (types.ModuleType, type)):
                self.visit(f"{name}.__self__", owner, depth, far)
        elif isinstance(function, types.FunctionType):
            self._code(function, depth, far)

    def _code(self, function: types.FunctionType, depth: int, far: int) -> None:
        code = function.__code__
        if not is_users_file(code.co_filename):
            return
        far += is_installed_file(code.co_filename)
        if far > _MAX_FAR:
            return
        if not far:
            self.found.numbers |= numbers_in(code)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self.visit(variable, cell, depth, far)
        defaults = f"{function.__name__}(default"
        for index, value in enumerate(function.__defaults__ or ()):
            self.visit(f"{defaults} {index})", value, depth, far, function, index)
        table = function.__kwdefaults__ or {}
        for key, value in table.items():
            self.visit(f"{defaults} {key})", value, depth, far, table, key)
        if function.__dict__:
            self.attributes(function.__qualname__, function, depth, far)
        names = names_in(code)
        self._name(names, code)
        table = function.__globals__
        mine = [key for key in names if key in table]
        self._names("", table, mine, depth, far)
        for key in mine:
            if isinstance(table[key], types.ModuleType):
                self._module_of_python(table[key], names, depth, far)
        for _, module in loaded(names):
            self._module_of_python(module, names, depth, far)

    def _module_of_python(
        self, module: types.ModuleType, names: frozenset[str], depth: int, far: int
    ) -> None:
        """Note what code reads of a module, by the names in it; of libraries only clocks."""
        if (id(module), names) in self._asked:
            return
        self._asked.add((id(module), names))
        table = vars(module)
        named = sorted(names & table.keys())
        if not is_users_file(file_of(module)):
            if module.__name__ in ("time", "datetime"):
                for key in named:
                    self._clock(table[key], table, key)
            return
        far += is_installed_file(file_of(module))
        if far <= _MAX_FAR:
            self._names(f"{module.__name__}.", table, named, depth, far)
            for key in named:
                if isinstance(table[key], types.ModuleType):
                    self._module_of_python(table[key], names, depth, far)

    def python_module(self, name: str, module: types.ModuleType, depth: int, far: int) -> None:
        """Note the data of a module that something holds; of libraries nothing."""
        file = file_of(module)
        if is_users_file(file) and not is_installed_file(file):
            table = vars(module)
            is_own = [key for key in table if not key.startswith("__") and _is_data(table[key])]
            self._names(f"{name}.", table, is_own, depth, far)

    def module(self, name: str, module: nn.Module, depth: int, far: int = 0) -> None:
        """Note the attributes of a module, and what its class names."""
        self._alive[id(module)] = module
        table = vars(module)
        own = {key: value for key, value in table.items() if key not in OWN}
        # Tensors are the business of whoever undoes an iteration.
        kept = {key: value for key, value in own.items() if not isinstance(value, Tensor)}
        self.found.hold(held.put_back_module, table, kept)
        self._each(f"{name}.", own, depth + 1, far, table)
        for key, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            if tensor is not None:
                self._tensor(f"{name}.{key}", tensor, depth, far)
        for key, child in children_of(module).items():
            if child is not None and id(child) not in self._alive:
                self.module(f"{name}.{key}", child, depth, far)
        self._class(type(module), depth, far)

    def _tensor(self, name: str, tensor: Tensor, depth: int, far: int) -> None:
        """Note the data among a tensor's attributes; others are torch's and ours."""
        table = tensor.__dict__
        if table and id(tensor) not in self._alive:
            self._alive[id(tensor)] = tensor
            kinds = {key: type(value) for key, value in table.items()}
            data = [key for key, kind in kinds.items() if kind in SCALARS or kind in _CONTAINERS]
            self._names(f"{name}.", table, data, depth, far)

    def item(self, name: str, owner: Any, depth: int, far: int) -> None:
        """Note the attributes and slots of an object, and what its class names."""
        far += is_installed_file(_file_of(type(owner)))
        if far > _MAX_FAR:
            return
        if isinstance(getattr(owner, "__dict__", None), dict):
            self.attributes(name, owner, depth, far)
        slots = [
            key
            for kind in type(owner).__mro__
            for key, member in vars(kind).items()
            if isinstance(member, types.MemberDescriptorType) and key not in _NO_SLOTS
        ]
        values = {key: getattr(owner, key, MISSING) for key in slots}
        self._attributes(f"{name}.", values, depth, far, owner)
        if isinstance(owner, (dict, list, set, collections.deque)):  # of a class of somebody's own
            container = next(k for k in _CONTAINERS if isinstance(owner, k))
            _CONTAINERS[container](self, name, owner, depth, far)
        self._class(type(owner), depth, far)

    def attributes(self, name: str, owner: Any, depth: int, far: int) -> None:
        saved = dict(owner.__dict__)
        self.found.hold(held.put_back_dict, owner.__dict__, saved)
        if isinstance(owner, _SCHEDULERS):
            saved = {key: value for key, value in saved.items() if key not in _COUNTS}
        self._each(f"{name}.", saved, depth, far, owner.__dict__)

    def optimizer(self, name: str, owner: torch.optim.Optimizer, depth: int, far: int) -> None:
        """Note the numbers of an optimizer: its state is tensors."""
        for index, group in enumerate(owner.param_groups):
            numbers = {key: value for key, value in group.items() if key != "params"}
            self.found.hold(held.put_back_names, group, numbers)
            for key, value in numbers.items():
                title = f"{name}.param_groups[{index}][{key!r}]"
                self.visit(title, value, depth, far, group, key)

    def user_class(self, name: str, kind: type, depth: int, far: int) -> None:
        """Note a class that is named."""
        del self._alive[id(kind)]
        self._class(kind, depth, far)

    def _class(self, kind: type, depth: int, far: int) -> None:
        """Note the attributes of a class of somebody's, and what its methods name."""
        of_itself: type = type(kind)
        for base in (*kind.__mro__, *of_itself.__mro__):
            if id(base) in self._alive:
                continue
            self._alive[id(base)] = base
            file = _file_of(base)
            nearby = far + is_installed_file(file)
            if not is_users_file(file) or nearby > _MAX_FAR:
                continue
            data: dict[str, Any] = {}
            for key, member in vars(base).items():
                functions = functions_of(member)
                for function in functions:
                    self._method(kind, key, function, depth, far)
                if functions or key.startswith("__"):
                    continue
                if not _is_descriptor(member):
                    data[key] = member
                elif is_users_file(_file_of(type(member))):
                    self.visit(f"{base.__name__}.{key}", member, depth, far)
            self._attributes(f"{base.__name__}.", data, depth, far, base)

    def _method(self, kind: type, key: str, function: Any, depth: int, far: int) -> None:
        """Note what a method names, if some code names it, or Python calls it.

        Models can also be built, loaded, saved and generated with, which no iteration does.
        """
        name = getattr(function, "__qualname__", key)
        if is_called_by_itself(kind, key, function) or key == "forward" or key in self._named:
            self.visit(name, function, depth, far)
        elif not (key == "__init__" and issubclass(kind, nn.Module)):
            item = (function, depth, far)
            self._unnamed.setdefault(key, []).append(item)
            self._unnamed_of.setdefault(name.rpartition(".")[0], []).append(item)

    def _name(self, names: frozenset[str], code: types.CodeType) -> None:
        """Remember what code names, and look at the methods that are called so."""
        new = names - self._named
        self._named |= new
        found = [item for key in new & self._unnamed.keys() for item in self._unnamed.pop(key)]
        if names & INDIRECT and not is_installed_file(code.co_filename):  # which by their texts?
            found += self._unnamed_of.pop(code.co_qualname.rpartition(".")[0], [])
        for function, depth, far in found:
            self.visit(getattr(function, "__qualname__", "a method"), function, depth, far)

    def reference(self, name: str, value: Any, depth: int, far: int) -> None:
        """Note what a weak reference refers to."""
        self.visit(f"{name}()", value(), depth, far)

    def iterator(self, name: str, value: Any, depth: int, far: int) -> None:
        self.found.places[name] = Place(held.position_of(value, 0), "advance", value)

    def generator(self, name: str, value: Any, depth: int = 0, far: int = 0) -> None:
        """Note the state of a generator of random numbers."""
        self._alive[id(value)] = value
        state = held.state_of(value)
        self.found.places[name] = Place(state, "generator", value)
        self.found.hold(held.put_back_generator, value, state)


_Look = Callable[[_Walk, str, Any, int, int], None]
_CONTAINERS: types.MappingProxyType[type, _Look] = types.MappingProxyType(
    {
        dict: _Walk.mapping,
        list: _Walk.sequence,
        collections.deque: _Walk.sequence,
        set: _Walk.collection,
    }
)


def _look_of(kind: type) -> _Look | None:
    """Return how things of a class are looked at."""
    rows: tuple[tuple[Any, _Look], ...] = (
        ((np.ndarray, array, bytearray), _Walk.numbers),
        ((types.CellType, contextvars.ContextVar), _Walk.box),
        (_FUNCTIONS, _Walk.function),
        ((random.Random, np.random.RandomState, np.random.Generator), _Walk.generator),
        (nn.Module, _Walk.module),
        (torch.optim.Optimizer, _Walk.optimizer),
        (_SCHEDULERS, _Walk.attributes),
        (type, _Walk.user_class),
        (weakref.ref, _Walk.reference),
        ((threading.local, *weakref.ProxyTypes), _Walk.item),
        (types.ModuleType, _Walk.python_module),
    )
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]
    if issubclass(kind, (Tensor, random.SystemRandom, enum.EnumMeta)):
        return None
    for kinds, look in rows:
        if issubclass(kind, kinds):
            return look
    root, _, _ = kind.__module__.partition(".")
    if callable(getattr(kind, "__next__", None)) and root in ("builtins", "itertools"):
        return _Walk.iterator
    if hasattr(kind, "__wrapped__") or kind.__name__ == "_lru_cache_wrapper":
        return _Walk.function
    if root in ("torch", "graphfsdp") and not kind.__module__.startswith("torch.utils.data"):
        return None
    return None if root in _MACHINERY else _Walk.item


def _called(value: Any) -> str:
    """Return what tells a function from another one, a class, and other things by their class."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} of line {value.__code__.co_firstlineno}"
    is_named = isinstance(value, (types.BuiltinFunctionType, type))
    name: str = (value if is_named else type(value)).__qualname__
    return name


def _is_data(value: Any) -> bool:
    return not isinstance(value, (*_FUNCTIONS, type, types.ModuleType))


def _plain_key(key: Any) -> Any:
    return key if type(key) in SCALARS or isinstance(key, tuple) else type(key).__name__


def _file_of(kind: type) -> str:
    return file_of(sys.modules.get(kind.__module__))


def _is_descriptor(member: Any) -> bool:
    return isinstance(
        member, (property, types.MemberDescriptorType, types.GetSetDescriptorType)
    ) or (hasattr(type(member), "__get__") and not isinstance(member, type))
