"""What a function's code reads by name, and what it assigns."""

import dis
import types
from dataclasses import dataclass, field

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_CLOSURE = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF")


@dataclass
class CodeNames:
    """The names in a function's code; functions that are defined within it are part of it.

    Attributes:
        globals: Global names that it reads, and what it reads of them right there (``cfg.x``).
        closures: Likewise, of the functions around it and of its own variables that inner
            functions share.
        locals: Likewise, of its arguments and other variables.
        whole: Names of all three that it also reads for something else (``f(cfg)``, ``c = cfg``).
        attributes: Everything that it reads as an attribute, of whatever it is.
        stored: Globals, closure variables and attributes that it assigns.
        writes_items: It assigns items of containers.
    """

    globals: dict[str, set[str]] = field(default_factory=dict)
    closures: dict[str, set[str]] = field(default_factory=dict)
    locals: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    writes_items: bool = False

    def read_of(self, name: str, table: dict[str, set[str]]) -> set[str]:
        """Return what may be read of a variable, and is not assigned.

        Args:
            name: The variable.
            table: Its kind: ``globals``, ``closures`` or ``locals``.
        """
        read = table.get(name, set())
        return (read | self.attributes if name in self.whole else read) - self.stored

    def read_of_self(self, function: types.FunctionType) -> set[str]:
        """Return what a method reads of the object that it belongs to, and does not assign."""
        name = next(iter(function.__code__.co_varnames), "")
        read = self.locals.get(name, set()) | self.closures.get(name, set())
        return read - self.stored

    def add(self, code: types.CodeType) -> None:
        """Take in the names of a function's code."""
        instructions = list(dis.get_instructions(code))
        for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
            name, table = instruction.argval, self._table(instruction.opname)
            if instruction.opname in _ATTRIBUTE:
                self.attributes.add(name)
            elif instruction.opname in _STORES:
                self.stored.add(name)
            elif instruction.opname == "STORE_SUBSCR":
                self.writes_items = True
            elif table is not None:
                # Some instructions load two variables; an attribute is read of the last of them.
                name = name[-1] if isinstance(name, tuple) else name
                read = table.setdefault(name, set())
                if following is not None and following.opname in _ATTRIBUTE:
                    read.add(following.argval)
                else:
                    self.whole.add(name)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.add(constant)

    def _table(self, opname: str) -> dict[str, set[str]] | None:
        if opname in _GLOBAL:
            return self.globals
        if opname in _CLOSURE:
            return self.closures
        return self.locals if opname.startswith("LOAD_FAST") else None


def names_of(function: types.FunctionType) -> CodeNames:
    """Return the names in a function's code."""
    names = CodeNames()
    names.add(function.__code__)
    return names


__all__ = ["CodeNames", "names_of"]
