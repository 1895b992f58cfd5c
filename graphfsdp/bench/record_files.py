"""Records of a benchmark as JSON files; whatever is read is checked, field by field."""

import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphfsdp.bench.records import KIND, SCHEMA_VERSION, BenchResult
from graphfsdp.errors import ConfigError

T = TypeVar("T")
_NUMBERS = re.compile(r"\[\s+(-?[\d.][^\[\]{}\"]*?)\s+\]")


def rounded(value: float) -> float:
    """Return a time with six significant digits: clocks know no more."""
    return float(f"{value:.6g}")


def to_data(record: object) -> Any:
    """Return a record as plain dicts, lists, strings and numbers.

    Numbers that are not finite become None, which JSON has and NaN is not.
    """
    return _plain(
        asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    )


def to_json(record: object) -> str:
    """Return a record as text; lists of numbers take one line each."""
    text = json.dumps(to_data(record), indent=1, allow_nan=False)
    return _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def from_data(kind: type[T], data: object, where: str = "result") -> T:
    """Return the record that ``to_data`` made these values of.

    Fields that are missing get their defaults; fields that no version knows are refused.

    Raises:
        ConfigError: a field is missing, unknown, or has another type; the message names it.
    """
    made = _read(kind, data, where)
    assert isinstance(made, kind)
    return made


def write_result(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """Write a result file; it is whole or not there."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.unfinished")
    unfinished.write_text(to_json(result), encoding="utf-8")
    os.replace(unfinished, target)


def read_result(path: str | os.PathLike[str]) -> BenchResult:
    """Read a result file, or the ``result.json`` of a result directory.

    Raises:
        ConfigError: it cannot be read, is no result of ``graphfsdp bench``, or was written by a
            later version.
    """
    source = Path(path)
    if source.is_dir():
        source = source / "result.json"
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source} cannot be read as a result of graphfsdp bench: {error}"
        ) from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ConfigError(
            f"{source} is not a result of graphfsdp bench (its kind is not {KIND!r}). Remedy: give "
            "the result.json of a result directory"
        )
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{source} has schema version {data.get('schema_version')}, this graphfsdp reads "
            f"{SCHEMA_VERSION}. Remedy: measure again, or use the graphfsdp that wrote it"
        )
    return from_data(BenchResult, data, str(source))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is object:
        return data
    if origin is types.UnionType or origin is typing.Union:
        if data is None and type(None) in arguments:
            return None
        (present,) = (item for item in arguments if item is not type(None))
        return _read(present, data, where)
    if origin is tuple:
        items = _expect(list, data, where)
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        items = _expect(dict, data, where)
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in items.items()}
    if is_dataclass(kind):
        return _read_record(kind, _expect(dict, data, where), where)
    if kind is float and type(data) is int:
        return float(data)
    return _expect(kind, data, where)


def _read_record(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    for name in data:
        if name not in known:
            raise ConfigError(
                f"{where}: unknown field {name!r}; expected {', '.join(sorted(known))}"
            )
    values = {name: _read(hints[name], item, f"{where}.{name}") for name, item in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _expect(kind: Any, data: Any, where: str) -> Any:
    if type(data) is not kind:
        raise ConfigError(f"{where}: expected {kind.__name__}, got {type(data).__name__}")
    return data
