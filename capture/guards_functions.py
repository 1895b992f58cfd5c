"""Guard of what the user's own functions take from around them: numbers, functions, tensors."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.attribute_log import AttributeLog
from graphfsdp._capture.code_names import CodeNames, names_of
from graphfsdp._capture.guards_modules import is_scalar
from graphfsdp._capture.guards_values import data_of
from graphfsdp._capture.quick_guard import Watched
from graphfsdp._capture.source import is_users_file
from graphfsdp.changes import Change, ChangeKind

_MAX_DEPTH = 4
_MAX_ITEMS = 1000
_MISSING = object()
_REMEDY = (
    "pass what changes as a tensor of the batch, or hold it in a tensor and write into that "
    "(fill_), which replays see"
)
_REMEDY_FUNCTION = "replace functions before the capture, and leave them so"
_REMEDY_TENSOR = (
    "write into the old tensor (copy_), which replays see, or pass it as a tensor of the batch"
)
_REMEDY_MODULE = "load new weights into the old module (load_state_dict), which replays see"
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_THINGS = (Tensor, nn.Module)


@dataclass(frozen=True, slots=True)
class _Number:
    """One number, function, tensor or module, and how to look at it again."""

    title: str
    look: Callable[[], Any]
    value: Any


class FunctionGuard:
    """Notices numbers that changed in globals, closures and configurations of functions.

    Looked at are the functions given, the ``forward`` of the model's classes, and the user's
    functions and methods that they name: what their code reads and never assigns. What they assign
    themselves, they count or log; a replay leaves it. Functions that they name must stay the same
    ones, those of torch too, and those that torch's own layers call; so must the tensors and
    modules that the recording has used.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        model: nn.Module,
        log: AttributeLog,
        was_read: Callable[[Tensor], bool],
    ) -> None:
        """Remember the numbers now.

        Args:
            functions: The loss function, or the user's iteration.
            model: The model.
            log: What the recorded iteration has read of modules.
            was_read: Tells whether the recording has touched a tensor's storage.
        """

        def is_used(value: object) -> bool:
            if isinstance(value, Tensor):
                return was_read(value)
            return isinstance(value, nn.Module) and bool(log.names_read(value))

        search = _Search(is_used)
        found = [number for each in functions for number in search.of_function(each, 0)]
        for kind in dict.fromkeys(map(type, model.modules())):
            found += search.of_class(kind)
        self._numbers = list({number.title: number for number in found}.values())
        things = [number for number in self._numbers if isinstance(number.value, _THINGS)]
        numbers = [number for number in self._numbers if not isinstance(number.value, _THINGS)]
        self._looks = [number.look for number in numbers]
        self._values = [number.value for number in numbers]
        self._thing_looks = [number.look for number in things]
        self._things = [number.value for number in things]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, with names for messages."""
        for number in self._numbers:
            if isinstance(number.value, Tensor):
                yield number.title, number.value

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        return list(map(operator.call, self._looks)) == self._values and all(
            map(operator.is_, map(operator.call, self._thing_looks), self._things)
        )

    def watched(self) -> Watched:
        """Return how to look again."""
        return Watched(rest=self.holds)

    def changes(self) -> list[Change]:
        """Compare each number and name what has changed."""
        found = []
        for number in self._numbers:
            now = number.look()
            if now is number.value or (is_scalar(now) and now == number.value):
                continue
            if not _is_same_memory(number.value, now):
                found.append(_change(number, now))
        return found


def _change(number: _Number, now: object) -> Change:
    value = number.value
    old, remedy = "one function", _REMEDY_FUNCTION
    if is_scalar(value):
        old, remedy = repr(value), _REMEDY
    elif isinstance(value, _THINGS):
        old = f"one {type(value).__name__}"
        remedy = _REMEDY_TENSOR if isinstance(value, Tensor) else _REMEDY_MODULE
    new = repr(now) if is_scalar(now) else f"another {type(now).__name__}"
    return Change(ChangeKind.ATTRIBUTE, number.title, old, new, remedy)


def _is_same_memory(old: object, new: object) -> bool:
    """Tell whether two tensors are one and the same to a kernel."""
    if type(old) is not type(new) or type(old) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(old, Tensor)
    assert isinstance(new, Tensor)
    if old.layout is not torch.strided or new.layout is not torch.strided:
        return False
    shapes = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in (old, new)]
    return shapes[0] == shapes[1]


class _Search:
    """Walks from a function to the numbers that it may read."""

    def __init__(self, is_used: Callable[[object], bool]) -> None:
        """Prepare.

        Args:
            is_used: Tells whether the recording has used a tensor or module.
        """
        self._seen: set[tuple[int, int]] = set()  # functions, and what they are bound to
        self._is_used = is_used

    def of_function(self, function: object, depth: int) -> Iterator[_Number]:
        """Yield the numbers around a function."""
        key = id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))
        if depth > _MAX_DEPTH or key in self._seen:
            return
        self._seen.add(key)
        if isinstance(function, functools.partial):
            yield from _items("keyword {} of a functools.partial", function.keywords)
            yield from self.of_function(function.func, depth)
            return
        owner = getattr(function, "__self__", None)  # of a bound method
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) and not isinstance(function, type):
            if not callable(function):
                return
            owner, function = function, type(function).__call__
        if isinstance(function, types.FunctionType) and is_users_file(
            function.__code__.co_filename
        ):
            yield from self._of_code(function, owner, depth)

    def of_class(self, kind: type[nn.Module]) -> Iterator[_Number]:
        """Yield the numbers around a module's forward, and around its methods that this names."""
        waiting, seen = ["forward"], {"forward"}
        while waiting:
            function = getattr(kind, waiting.pop(), None)
            key = id(function), id(None)
            if not isinstance(function, types.FunctionType) or key in self._seen:
                continue
            self._seen.add(key)
            if is_users_file(function.__code__.co_filename):
                yield from self._of_code(function, None, 1)
            elif function.__module__.startswith("torch.nn.modules."):
                yield from _functions_of_torch(function)
            named = names_of(function).read_of_self(function) - seen
            named -= vars(nn.Module).keys()
            waiting += sorted(named)
            seen |= named

    def _of_code(
        self, function: types.FunctionType, owner: object, depth: int
    ) -> Iterator[_Number]:
        names = names_of(function)
        where = f"of {function.__qualname__}"
        if owner is not None and not isinstance(owner, nn.Module | type):
            attributes = getattr(owner, "__dict__", {})
            read = names.read_of_self(function)
            yield from self._items_of(f"attribute {{}} {where}", attributes, read)
            for name in sorted(read):
                method = getattr(type(owner), name, None)
                if isinstance(method, types.FunctionType):  # maybe in a decorator of torch's
                    method = types.MethodType(inspect.unwrap(method), owner)
                    yield from self.of_function(method, depth + 1)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        around = [
            (
                f"closure variable {name!r} {where}",
                functools.partial(_content, cell),
                names.read_of(name, names.closures),
            )
            for name, cell in cells
            if name not in names.stored
        ]
        around += [
            (
                f"global variable {name!r} of {function.__module__}",
                functools.partial(function.__globals__.get, name, _MISSING),
                names.read_of(name, names.globals),
            )
            for name in sorted((names.globals.keys() - names.stored) & function.__globals__.keys())
        ]
        for title, look, read in around:
            yield from self._of_value(title, look, read, names, depth)

    def _of_value(
        self, title: str, look: Callable[[], Any], read: set[str], names: CodeNames, depth: int
    ) -> Iterator[_Number]:
        value = look()
        if is_scalar(value) or self._is_used(value):
            yield _Number(title, look, value)
        elif isinstance(value, _THINGS):
            return
        elif isinstance(value, dict):
            if names.writes_items:
                return
            if not any(isinstance(item, Tensor) for item in dict.values(value)):
                yield from _leaves(title, look, value, None, 0)
            for key, item in dict.items(value):
                if self._is_used(item):
                    again = functools.partial(_look_into, look, key, True)
                    yield _Number(f"{key!r} of {title}", again, item)
        elif isinstance(value, types.ModuleType):
            table = vars(value)
            if is_users_file(getattr(value, "__file__", None) or "<"):
                yield from _items(f"{{}} of {title}", table, read)
            yield from _functions(value, read)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            if isinstance(value, types.FunctionType):
                yield _Number(title, look, value)
            yield from self.of_function(value, depth + 1)
        elif (attributes := data_of(value)) is not None:
            yield from _items(f"{{}} of {title}", attributes, read)
        elif _is_tree(value, 0):
            yield from _leaves(title, look, value, read | names.attributes - names.stored, 0)
        elif not isinstance(value, type):
            # An object that holds much else: only what is read of it right here.
            yield from self._items_of(f"{{}} of {title}", getattr(value, "__dict__", {}), read)

    def _items_of(self, title: str, table: Mapping[str, Any], names: set[str]) -> Iterator[_Number]:
        """Yield the numbers in an object's attributes, and the tensors and modules in use."""
        yield from _items(title, table, names)
        for key, value in table.items():
            if key in names and self._is_used(value):
                look = functools.partial(table.get, key, _MISSING)
                yield _Number(title.format(repr(key)), look, value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned to it yet
        return _MISSING


def _items(
    title: str, table: Mapping[str, Any], names: set[str] | None = None
) -> Iterator[_Number]:
    for key, value in table.items():
        if is_scalar(value) and (names is None or key in names):
            look = functools.partial(table.get, key, _MISSING)
            yield _Number(title.format(repr(key)), look, value)


def _functions(module: types.ModuleType, names: Iterable[str]) -> Iterator[_Number]:
    """Yield the functions that are read of a Python module, to be compared by identity."""
    table = vars(module)
    for name in sorted(names):
        value = table.get(name)
        if isinstance(value, _FUNCTIONS):
            title = f"function {name!r} of {module.__name__}"
            yield _Number(title, functools.partial(table.get, name, _MISSING), value)


def _functions_of_torch(function: types.FunctionType) -> Iterator[_Number]:
    names = names_of(function)
    for name in names.globals.keys() & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from _functions(value, names.read_of(name, names.globals))


def _is_tree(value: object, depth: int) -> bool:
    """Tell whether an object is data, and objects and dicts of data, like a configuration."""
    if depth > _MAX_DEPTH or isinstance(value, (nn.Module, Tensor, types.ModuleType, type)):
        return False
    if data_of(value) is not None:
        return True
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(inner, dict) or not inner:
        return False
    return all(
        item is None or is_scalar(item) or isinstance(item, _FUNCTIONS) or _is_tree(item, depth + 1)
        for item in dict.values(inner)
    )


def _leaves(
    title: str, look: Callable[[], Any], value: Any, names: set[str] | None, depth: int
) -> Iterator[_Number]:
    """Yield the numbers in a tree of objects and dicts; of objects those that are read."""
    is_dict = isinstance(value, dict)
    table = value if is_dict else getattr(value, "__dict__", {})
    if depth > _MAX_DEPTH or len(table) > _MAX_ITEMS:
        return
    for key, item in dict.items(table):
        if not is_dict and names is not None and key not in names:
            continue
        inner_title = f"{key!r} of {title}"
        again = functools.partial(_look_into, look, key, is_dict)
        if is_scalar(item):
            yield _Number(inner_title, again, item)
        elif isinstance(item, dict) or _is_tree(item, depth + 1):
            yield from _leaves(inner_title, again, item, names, depth + 1)


def _look_into(look: Callable[[], Any], key: Any, is_dict: bool) -> Any:
    outer = look()
    if is_dict:
        # dict's own: a subclass may have a `get` of another form (Hugging Face has one)
        return dict.get(outer, key, _MISSING) if isinstance(outer, dict) else _MISSING
    return getattr(outer, key, _MISSING)


__all__ = ["FunctionGuard"]
