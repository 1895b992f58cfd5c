"""What a function's code reads by name, and what it assigns."""

import dis
import types
from collections.abc import Set
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
        after: What it reads right behind an attribute: ``beta`` behind ``cfg`` in ``x.cfg.beta``.
        whole_attributes: Attributes that it also reads for something else (``f(x.cfg)``).
        imports: Names of modules that it imports.
        constants: Strings that it consists of.
        stored: Globals, closure variables and attributes that it assigns.
    """

    globals: dict[str, set[str]] = field(default_factory=dict)
    closures: dict[str, set[str]] = field(default_factory=dict)
    locals: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    after: dict[str, set[str]] = field(default_factory=dict)
    whole_attributes: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)

    def read_of(
        self, name: str, table: dict[str, set[str]], elsewhere: Set[str] = frozenset()
    ) -> set[str]:
        """Return what may be read of a variable, and is not assigned.

        Args:
            name: The variable.
            table: Its kind: ``globals``, ``closures`` or ``locals``.
            elsewhere: What other functions read, which it may be handed to.
        """
        read = table.get(name, set())
        return (read | self.attributes | elsewhere if name in self.whole else read) - self.stored

    def read_behind(self, attribute: str, elsewhere: Set[str] = frozenset()) -> set[str]:
        """Return what may be read of an attribute's value, and is not assigned."""
        read = self.after.get(attribute, set())
        is_whole = attribute in self.whole_attributes
        return (read | self.attributes | elsewhere if is_whole else read) - self.stored

    def read_of_self(
        self, function: types.FunctionType, elsewhere: Set[str] = frozenset()
    ) -> set[str]:
        """Return what a method reads of the object that it belongs to, and does not assign."""
        name = next(iter(function.__code__.co_varnames), "")
        read = self.locals.get(name, set()) | self.closures.get(name, set())
        return (read | elsewhere if name in self.whole else read) - self.stored

    def merge(self, other: "CodeNames") -> None:
        """Take in other code's names, but for what it assigns."""
        for mine, its in (
            *((self.globals, other.globals), (self.closures, other.closures)),
            *((self.locals, other.locals), (self.after, other.after)),
        ):
            for name, read in its.items():
                mine.setdefault(name, set()).update(read)
        self.whole |= other.whole
        self.attributes |= other.attributes
        self.whole_attributes |= other.whole_attributes

    def add(self, code: types.CodeType) -> None:
        """Take in the names of a function's code."""
        instructions = list(dis.get_instructions(code))
        for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
            name, table = instruction.argval, self._table(instruction.opname)
            if instruction.opname in _ATTRIBUTE:
                self.attributes.add(name)
                if following is not None and following.opname in _ATTRIBUTE:
                    self.after.setdefault(name, set()).add(following.argval)
                else:
                    self.whole_attributes.add(name)
            elif instruction.opname == "IMPORT_NAME":
                self.imports.add(name)
            elif instruction.opname == "IMPORT_FROM":
                self.attributes.add(name)
                self.whole_attributes.add(name)
            elif instruction.opname in _STORES:
                self.stored.add(name)
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
            elif isinstance(constant, str):
                self.constants.add(constant)

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
