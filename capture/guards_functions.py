"""Guard of the numbers that the user's own functions take from around them."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.code_names import names_of
from graphfsdp._capture.guards_modules import is_scalar
from graphfsdp._capture.guards_values import data_of
from graphfsdp._capture.source import is_users_file
from graphfsdp.changes import Change, ChangeKind

_MAX_DEPTH = 4
_MISSING = object()
_REMEDY = (
    "pass what changes as a tensor of the batch, or hold it in a tensor and write into that "
    "(fill_), which replays see"
)


@dataclass(frozen=True, slots=True)
class _Number:
    """One number, and how to look at it again."""

    title: str
    look: Callable[[], Any]
    value: Any


class FunctionGuard:
    """Notices numbers that changed in globals, closures and configurations of functions.

    Looked at are the functions given, and the user's functions that they name: what their code
    reads and never assigns. What they assign themselves, they count or log; a replay leaves it.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Remember the numbers now.

        Args:
            functions: The loss function, or the user's iteration.
        """
        search = _Search()
        found = [number for each in functions for number in search.of_function(each, 0)]
        self._numbers = list({number.title: number for number in found}.values())
        self._looks = [number.look for number in self._numbers]
        self._values = [number.value for number in self._numbers]

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        return [look() for look in self._looks] == self._values

    def changes(self) -> list[Change]:
        """Compare each number and name what has changed."""
        found = []
        for number in self._numbers:
            now = number.look()
            if now is number.value or (is_scalar(now) and now == number.value):
                continue
            new = repr(now) if is_scalar(now) else f"a {type(now).__name__}"
            kind = ChangeKind.ATTRIBUTE
            found.append(Change(kind, number.title, repr(number.value), new, _REMEDY))
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
            value = look()
            if is_scalar(value):
                yield _Number(title, look, value)
            elif isinstance(value, dict):
                if not names.writes_items and not any(
                    isinstance(item, Tensor) for item in value.values()
                ):
                    yield from _items(f"{{}} of {title}", value)
            elif isinstance(value, types.ModuleType):
                if is_users_file(getattr(value, "__file__", None) or "<"):
                    yield from _items(f"{{}} of {title}", vars(value), read)
            elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                yield from self.of_function(value, depth + 1)
            elif (attributes := data_of(value)) is not None:
                yield from _items(f"{{}} of {title}", attributes, read)


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


__all__ = ["FunctionGuard"]
