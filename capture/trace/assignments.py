"""Finds the line in a program's text that assigns an attribute, for what nobody has watched."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn

from graphfsdp._capture.trace.source import is_users_file
from graphfsdp.base.hazards import SourceLine

_READS = ("LOAD_ATTR", "LOAD_METHOD")


def assignment_of(owner: object, name: str, model: nn.Module | None = None) -> SourceLine | None:
    """Return where an object's attribute is given another value, or its tensor other memory.

    Args:
        owner: Its class's methods are searched, ``forward`` and ``step`` first, constructors not.
        name: Of the attribute.
        model: The classes of its modules are searched next: parents assign to children.
    """
    classes = [type(owner), *(map(type, model.modules()) if model is not None else ())]
    for kind in dict.fromkeys(classes):
        for code in _codes(kind):
            line = _line(code, name)
            if line is not None:
                return SourceLine(code.co_filename, line, code.co_qualname)
    return None


def _codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of all methods of a class that the user has written."""
    for base in kind.__mro__:
        methods = {k: v for k, v in vars(base).items() if k not in ("__init__", "__new__")}
        for name in sorted(methods, key=lambda name: name not in ("forward", "step")):
            value = methods[name]
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if callable(function):
                function = inspect.unwrap(function)  # torch wraps the step of optimizers
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and is_users_file(code.co_filename):
                yield from _with_inner(code)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _line(code: CodeType, name: str) -> int | None:
    """Return the first line of ``x.name = ...``, ``x.name.data = ...`` or ``x.name.set_(...)``."""
    previous = None
    for instruction in dis.get_instructions(code):
        line = None if instruction.positions is None else instruction.positions.lineno
        assigns = instruction.opname == "STORE_ATTR"
        if assigns and instruction.argval == name:
            return line
        moves = (assigns and instruction.argval == "data") or (
            instruction.opname in _READS and instruction.argval == "set_"
        )
        if moves and previous is not None and previous.argval == name:
            return line
        previous = instruction
    return None
