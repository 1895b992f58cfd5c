"""Guard of the numbers and functions that the user's own functions take from around them."""

import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class _Number:
    """One number, or one function, and how to look at it again."""

    title: str
    look: Callable[[], Any]
    value: Any


class FunctionGuard:
    """Notices numbers that changed in globals, closures and configurations of functions.

    Looked at are the functions given, the ``forward`` of the model's classes, and the user's
    functions and methods that they name: what their code reads and never assigns. What they assign
    themselves, they count or log; a replay leaves it. Functions that they name must stay the same
    ones, those of torch too, and those that torch's own layers call.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], model: nn.Module) -> None:
        """Remember the numbers now.

        Args:
            functions: The loss function, or the user's iteration.
            model: The model.
        """
        search = _Search()
        found = [number for each in functions for number in search.of_function(each, 0)]
        for kind in dict.fromkeys(map(type, model.modules())):
            found += search.of_class(kind)
        self._numbers = list({number.title: number for number in found}.values())
        self._looks = [number.look for number in self._numbers]
        self._values = [number.value for number in self._numbers]

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        return list(map(operator.call, self._looks)) == self._values

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
            kind, is_number = ChangeKind.ATTRIBUTE, is_scalar(number.value)
            old = repr(number.value) if is_number else "one function"
            new = repr(now) if is_scalar(now) else f"another {type(now).__name__}"
            remedy = _REMEDY if is_number else _REMEDY_FUNCTION
            found.append(Change(kind, number.title, old, new, remedy))
        return found


class _Search:
    """Walks from a function to the numbers that it may read."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of_function(self, function: object, depth: int) -> Iterator[_Number]:
        """Yield the numbers around a function."""
        if depth > _MAX_DEPTH or id(function) in self._seen:
            return
        self._seen.add(id(function))
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
            if not isinstance(function, types.FunctionType) or id(function) in self._seen:
                continue
            self._seen.add(id(function))
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
            yield from _items(f"attribute {{}} {where}", attributes, names.read_of_self(function))
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
        if is_scalar(value):
            yield _Number(title, look, value)
        elif isinstance(value, dict):
            if not names.writes_items and not any(
                isinstance(item, Tensor) for item in dict.values(value)
            ):
                yield from _leaves(title, look, value, None, 0)
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
