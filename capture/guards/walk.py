"""What an iteration reads around it: the places that the names in the code that ran lead to.

The bound: what users' code that ran names, and what lies behind that as far as they name it; of an
installed package only what its code reads of the objects that it belongs to.
"""

import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.names import OF_PYTHON, Names, ReadNames, functions_of
from graphfsdp._capture.guards.places import (
    CONTAINERS,
    FUNCTIONS,
    MISSING,
    Place,
    copy_of,
    is_drawn_from,
    is_plain,
    shared_generators,
    state_of,
    words_for,
)
from graphfsdp._capture.trace.source import file_of, has_compiled, is_installed_file, is_users_file
from graphfsdp.errors import CaptureError, HazardKind

_MAX_ITEMS = 10_000  # longer containers are not looked at
_MAX_OBJECTS = 1_000  # in one container
_MAX_DEPTH = 6
_SHOWING = frozenset({"logging", "loguru", "rich", "tensorboard", "tensorboardX", "tqdm", "wandb"})
# What every module has; its mode is set by whoever calls the iteration. Recurrent ones keep lists
# of their parameters, which are asked of themselves.
_OF_RECURRENT = ("_flat_weights", "_flat_weight_refs")
OWN = frozenset((*vars(nn.Module()), *dir(nn.Module), *_OF_RECURRENT)) - {"forward"}
_OF_UNITS = ("gradient_divide_factor",)  # what graphfsdp's own code reads of sharded modules


class Walk:
    """Finds all places that the functions of an iteration, and the code that ran, lead to.

    Attributes:
        places: By title.
        sure: Titles of those that the model and its functions lead to; others come of functions
            that merely have the code, of which some are made anew each time.
        modules: The modules that it met, by their ids, with what they are called.
        tables: What other objects that it met hold as attributes, by ids.
    """

    def __init__(self, names: ReadNames, model: nn.Module, functions: Sequence[Any]) -> None:
        """Walk now; ``functions`` are the loss function, or the user's iteration, and hooks."""
        for function in functions:  # whether it has run yet or not
            code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
            if isinstance(code, types.CodeType):
                names.ran.codes.add(code)
        names.follow()
        self.places: dict[str, Place] = {}
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self.tables: dict[int, dict[str, Any]] = {}
        self._names = names
        self._seen: set[tuple[object, ...]] = set()
        self._alive: list[object] = []  # whose ids are in there
        self._met: set[types.CodeType] = set()
        self.modules |= {id(module): (path, module) for path, module in model.named_modules()}
        for title, (generator, name) in shared_generators().items():
            self._draws(title, generator, name)
        for path, module in list(self.modules.values()):
            self._module(path, module)
        for function in functions:
            self._callable(getattr(function, "__name__", type(function).__name__), function, 0)
        self.sure = frozenset(self.places)
        for function in names.functions(self._met):
            self._function(function)

    def outside(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules that are none of the model's, named by the class of the outermost."""
        inside = set(map(id, model.modules()))
        return [item for key, item in self.modules.items() if key not in inside]

    def reads_mode(self, module: nn.Module) -> bool:
        """Tell whether code that ran asks a module, or a part of it, for its mode."""
        return any("training" in self._names.read_of_class(type(part)) for part in module.modules())

    # Functions.

    def _callable(self, title: str, function: Any, depth: int) -> None:
        """Look at what a call of something uses beside the code."""
        if isinstance(function, partial):
            self._callable(title, function.func, depth)
            read = self._read_by(function.func)
            for given, kind in (
                (dict(enumerate(function.args)), "argument"),
                (function.keywords, "keyword"),
            ):
                for key, value in given.items():
                    what = f"{kind} {key!r} of a functools.partial"
                    self._variable(what, given, key, value, read, read, depth)
        elif isinstance(function, types.MethodType):
            self._callable(title, function.__func__, depth)
            self._contents(_owner_title(function), function.__self__, (), (), depth)
        elif isinstance(function, types.FunctionType):
            inner = inspect.unwrap(function)
            if isinstance(inner, types.FunctionType):
                self._function(inner)
            if function.__code__ in self._names.codes:
                self._function(function)
        elif callable(getattr(function, "__wrapped__", None)):
            self._callable(title, function.__wrapped__, depth)
        elif not isinstance(function, (type, types.BuiltinMethodType)):
            self._contents(title, function, (), (), depth)

    def _read_by(self, function: Any) -> AbstractSet[str]:
        """Return what a function may read of what it is given."""
        function = inspect.unwrap(function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        ran = isinstance(code, types.CodeType) and code in self._names.codes
        return self._names.deeper(code) if ran else self._names.handed  # type: ignore[arg-type]

    def _function(self, function: types.FunctionType) -> None:
        """Look at what a function that ran names: cells, defaults, globals, attributes of its own.

        What an installed package names is none of the iteration's.
        """
        code = function.__code__
        is_users = is_users_file(code.co_filename) and not is_installed_file(code.co_filename)
        is_known = code in self._names.codes and is_users
        # Torch's checks of compiled code are made of a text, by a function of this name.
        if not is_known or function.__qualname__.startswith("___make_guard_fn"):
            return
        if not self._is_new("function", function):
            return
        self._met.add(code)
        reads, where = self._names.of(code), f"of {function.__qualname__}"
        table = function.__globals__
        self._note(f"the code {where}", function, "__code__", code, function.__name__)
        cells: dict[str, tuple[Any, Any]] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells[name] = cell, cell.cell_contents
            except ValueError:  # empty yet
                continue
        near = [content for _, content in cells.values()]
        near += [table.get(name) for name in reads.globals]
        deeper = self._names.deeper(code, (each for each in near if isinstance(each, str)))
        if function.__defaults__ is not None:
            title, defaults = f"the default arguments {where}", function.__defaults__
            self._note(title, function, "__defaults__", defaults, "")
            for name, value in zip(_with_defaults(code, defaults), defaults, strict=True):
                self._contents(f"the default of {name!r} {where}", value, deeper, deeper, 0, name)
        given = function.__kwdefaults__ or {}
        for name, value in given.items():
            self._variable(f"default of {name!r} {where}", given, name, value, deeper, deeper, 0)
        for name, (cell, value) in sorted(cells.items(), key=lambda item: item[0]):
            title, read = f"closure variable {name!r} {where}", reads.of(name, deeper)
            self._variable(
                title, cell, "cell_contents", value, read, deeper, 0, name, texts=reads.texts
            )
        found = reads.globals | (self._names.texts if "globals" in reads.globals else set())
        for name in sorted(found & table.keys()):
            title, read = (
                f"global variable {name!r} of {function.__module__}",
                reads.of(name, deeper),
            )
            self._variable(title, table, name, table[name], read, deeper, 0, texts=reads.texts)
        by_text = reads.texts if "modules" in reads.attributes else set()  # of sys
        for name in sorted((by_text | reads.imports) & sys.modules.keys()):
            if isinstance(sys.modules[name], types.ModuleType):
                self._python_module(
                    f"module {name!r}", sys.modules[name], reads.attributes, reads.attributes
                )

    # Objects.

    def _module(self, path: str, module: nn.Module) -> None:
        """Look at what code that ran reads of a module, and of what that holds."""
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"the iteration comes to {path or type(module).__name__!r}, which is TorchScript; "
                "its attributes lie in C++, where nothing sees that they change. Ways out: the "
                "module as it was before torch.jit.script or trace, with the same state_dict; "
                "graphfsdp.capture_in_place, which runs it as written; or scope='none'",
                kind=HazardKind.STATE,
            )
        self.modules.setdefault(id(module), (path, module))
        kind, handed = type(module), self._names.handed
        # What functions read of a module that they are handed, if it has that.
        names: dict[str, AbstractSet[str]] = {
            name: handed for name in handed if name in vars(module) or hasattr(kind, name)
        }
        names |= {name: frozenset() for name in _OF_UNITS if hasattr(kind, name)}
        names |= {"forward": frozenset(), **self._names.read_of_class(kind)}
        if has_compiled():  # which reads below Python
            public = (name for name in vars(module) if not name.startswith("_"))
            names |= {name: frozenset() for name in public if name not in names}
        self._attributes(path, module, names, 0)

    def _attributes(self, title: str, owner: Any, names: Names, depth: int) -> None:
        """Look at what is read of an object: what it holds, and what its class gives it."""
        kind = owner if isinstance(owner, type) else type(owner)
        is_module = isinstance(owner, nn.Module)
        own = None if owner is kind else _attributes_of(owner)
        for name in sorted(names.keys() - OWN if is_module else names.keys()):
            deeper = names[name]
            dotted = f"{title}.{name}".lstrip(".")
            what = f"attribute {dotted!r}" if is_module else f"{name!r} of {title}"
            if own is not None and name in own:
                self._variable(
                    what, own, name, own[name], deeper, deeper, depth, f".{name}", owner=owner
                )
                continue
            if is_module and isinstance(owner._modules.get(name), nn.Module):
                self._contents(name, owner._modules[name], deeper, deeper, depth)
                continue
            if _holds_elsewhere(owner, name):
                held = getattr(owner, name, MISSING)
                self._variable(
                    what, owner, name, held, deeper, deeper, depth, f".{name}", owner=owner
                )
                continue
            base = next((base for base in kind.__mro__ if name in vars(base)), None)
            # What an object gets of its own comes before what its class has, and before a default
            # with which code asks for it by its name.
            is_asked_for = base is not None or name in self._names.texts
            if own is not None and (is_asked_for or (is_module and not depth)):
                self._note(what, own, name, MISSING, f".{name}")
            elif own is None and base is None and is_asked_for and owner is kind:
                self._note(what, vars(kind), name, MISSING, f".{name}", of_class=kind)
            if base is not None and base not in OF_PYTHON:
                self._add_class(owner, base, name, deeper, depth)

    def _add_class(
        self, owner: Any, base: type, name: str, deeper: AbstractSet[str], depth: int
    ) -> None:
        member, where = vars(base)[name], f"{base.__qualname__}.{name}"
        functions = functions_of(member)
        if functions:
            self._note(where, vars(base), name, member, f".{name}", of_class=base)
            return
        is_data = isinstance(member, (Tensor, *CONTAINERS)) or is_plain(member)
        is_library = _is_of_a_library(base)
        if is_data or not (is_library or hasattr(type(member), "__get__")):
            self._variable(
                where, vars(base), name, member, deeper, deeper, depth, f".{name}", of_class=base
            )

    def _variable(
        self,
        title: str,
        holder: Any,
        key: Any,
        value: Any,
        read: Iterable[str],
        deeper: AbstractSet[str],
        depth: int,
        name: str | None = None,
        *,
        texts: AbstractSet[str] = frozenset(),
        owner: Any = None,
        of_class: type | None = None,
    ) -> None:
        """Note a variable, and what it holds: ``read`` of it, ``deeper`` of what that holds."""
        at = title if isinstance(holder, types.MappingProxyType) else holder
        read = frozenset(read)
        if value is MISSING or not self._is_new("variable", at, repr(key), read):
            return
        name = str(key) if name is None else name
        if isinstance(value, types.ModuleType):
            self._python_module(title, value, read, deeper)
            return
        self._note(title, holder, key, value, name, owner, of_class)
        if isinstance(value, torch.optim.Optimizer):
            if "param_groups" in read:
                for index, group in enumerate(value.param_groups):
                    for each in sorted(texts & group.keys() - {"params"}):
                        what = f"{each!r} of group {index} of {title}"
                        self._note(what, group, each, group[each], each)
            return
        if depth <= _MAX_DEPTH:
            self._contents(title, value, read, deeper, depth, name)

    def _contents(
        self,
        title: str,
        value: Any,
        read: Iterable[str],
        deeper: Iterable[str],
        depth: int,
        name: str = "",
    ) -> None:
        """Note the items of a container, and what is read of an object."""
        read, deeper = frozenset(read), frozenset(deeper)
        if is_plain(value) or value is MISSING or _shows(value):
            return
        if isinstance(value, nn.Module):
            if id(value) not in self.modules:
                for path, module in value.named_modules():
                    self._module(f"{type(value).__name__}.{path}".rstrip("."), module)
            if depth <= _MAX_DEPTH and self._is_new("module", value, read, deeper):
                path = self.modules[id(value)][0]
                self._attributes(path, value, dict.fromkeys(read, deeper), depth + 1)
        elif isinstance(value, Tensor):
            self._attributes(
                title, value, dict.fromkeys(read & value.__dict__.keys(), deeper), depth
            )
        elif isinstance(value, weakref.ref):
            self._contents(title, value(), read, deeper, depth, name)
        elif isinstance(value, tuple):
            self._objects_in(title, value, deeper, depth, name)
        elif is_drawn_from(value):
            self._draws(title, value, name)
        else:
            if isinstance(value, CONTAINERS):
                self._items(title, value, name)
                self._objects_in(title, value, deeper, depth, name)
            elif isinstance(value, np.ndarray):
                if value.dtype != object and value.size <= _MAX_ITEMS:
                    self._look(f"the values of {title}", value, name)
                return
            is_callable = callable(value) and not isinstance(value, type)
            if is_callable and self._is_new("callable", value):
                self._callable(title, value, depth + 1)
            self._object(title, value, read, deeper, depth)

    def _object(
        self, title: str, value: Any, read: AbstractSet[str], deeper: AbstractSet[str], depth: int
    ) -> None:
        names = dict.fromkeys(read, deeper)
        table = None if isinstance(value, (type, *FUNCTIONS)) else _attributes_of(value)
        if table is not None:
            self.tables[id(table)] = table
        if isinstance(value, type) or not isinstance(value, FUNCTIONS):
            kind = value if isinstance(value, type) else type(value)
            for name, more in self._names.read_of_class(kind).items():
                names[name] = names.get(name, frozenset()) | more
        if names and depth <= _MAX_DEPTH and self._is_new("object", value, frozenset(names)):
            self._attributes(title, value, names, depth + 1)

    def _objects_in(
        self, title: str, live: Any, read: AbstractSet[str], depth: int, name: str
    ) -> None:
        if len(live) > _MAX_OBJECTS or depth >= _MAX_DEPTH:
            return
        for key, item in list(dict.items(live) if isinstance(live, dict) else enumerate(live)):
            is_data = is_plain(item) or isinstance(item, Tensor)
            if not is_data and self._is_new("inside", item, read):
                self._contents(f"{key!r} of {title}", item, read, read, depth + 1, name)

    def _python_module(
        self, title: str, module: types.ModuleType, read: AbstractSet[str], deeper: AbstractSet[str]
    ) -> None:
        """Look at what is read of a Python module, or of one in it; of others only functions."""
        if not self._is_new("module", module, frozenset(read)):
            return
        file, table = file_of(module), vars(module)
        is_users = is_users_file(file) and not is_installed_file(file)
        for name in sorted(read & table.keys()):
            value, what = table[name], f"{name!r} of {title}"
            is_function = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
            if is_function:
                what = f"function {name!r} of {module.__name__}"
            if isinstance(value, types.ModuleType):
                self._python_module(f"module {value.__name__!r}", value, deeper, deeper)
            elif is_users:
                self._variable(what, table, name, value, deeper, deeper, 0, f".{name}")
            elif is_function or (is_users_file(file) and is_plain(value)):
                self._note(what, table, name, value, f".{name}")

    # Places.

    def _items(self, title: str, live: Any, name: str) -> None:
        if len(live) > _MAX_ITEMS:
            return
        if isinstance(live, dict) and any(isinstance(each, Tensor) for each in dict.values(live)):
            for key, item in dict.items(live):  # a cache may get more of them
                self._note(f"{key!r} of {title}", live, key, item, name)
        else:
            self._look(f"the items of {title}", live, name)

    def _note(
        self,
        title: str,
        holder: Any,
        key: Any,
        value: Any,
        name: str,
        owner: Any = None,
        of_class: type | None = None,
    ) -> None:
        if isinstance(value, np.ndarray):
            return
        at = title if isinstance(holder, types.MappingProxyType) else holder  # another each time
        if self._is_new("place", at, repr(key)):
            kinds = (kind for kind in (dict, types.MappingProxyType) if isinstance(holder, kind))
            getter = next((kind.get for kind in kinds), getattr)
            dicts = [holder] if getter is dict.get else []
            what = (getter, holder, key, MISSING)
            self._add(Place(title, what, value, exact=True, dicts=dicts), name, owner, of_class)

    def _look(self, title: str, live: Any, name: str) -> None:
        """Note what something holds, by looking at it; see ``copy_of``."""
        if self._is_new("place", live):
            # What is in a container is compared with the container itself.
            is_live = isinstance(live, CONTAINERS)
            what = (operator.getitem, (live,), 0) if is_live else (copy_of, live)
            dicts = [live] if isinstance(live, dict) else []
            self._add(Place(title, what, copy_of(live), dicts=dicts), name)

    def _draws(self, title: str, value: Any, name: str) -> None:
        """Note how far a generator of random numbers, or an iterator, has come."""
        if self._is_new("drawn", value):
            self._add(Place(words_for(title, value), (state_of, value), state_of(value)), name)

    def _add(
        self, place: Place, name: str, owner: Any = None, of_class: type | None = None
    ) -> None:
        """Add a place, under a title of its own."""
        number, title = 1, place.title
        while place.title in self.places:
            number += 1
            place.title = f"{title} ({number})"
        place.name, place.owner, place.of_class = name, owner, of_class
        self.places[place.title] = place

    def _is_new(self, what: str, *parts: object) -> bool:
        key = (what, *(p if isinstance(p, (str, frozenset)) else id(p) for p in parts))
        if key in self._seen:
            return False
        self._alive.extend(parts)
        self._seen.add(key)
        return True


def _shows(value: Any) -> bool:
    """Tell whether something only logs, or shows progress: nothing follows from what it counts."""
    return type(value).__module__.partition(".")[0] in _SHOWING


def _with_defaults(code: types.CodeType, defaults: Sequence[Any]) -> Sequence[str]:
    names = code.co_varnames[: code.co_argcount]
    return names[len(names) - len(defaults) :]


def _owner_title(method: types.MethodType) -> str:
    owner = method.__self__
    return owner.__qualname__ if isinstance(owner, type) else type(owner).__qualname__


def _is_of_a_library(thing: type) -> bool:
    file = file_of(sys.modules.get(thing.__module__))
    return not is_users_file(file) or is_installed_file(file)


def _holds_elsewhere(owner: Any, name: str) -> bool:
    """Tell whether an attribute lies in a slot, of this thread, or in what a proxy stands for."""
    is_slot = isinstance(getattr(type(owner), name, None), types.MemberDescriptorType)
    return is_slot or isinstance(owner, (threading.local, *weakref.ProxyTypes))


def _attributes_of(owner: Any) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found
