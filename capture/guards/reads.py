"""What the code of a function reads by name, in it and of what it is handed."""

import dis
import types
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from torch import Tensor

from graphfsdp._capture.trace.reach import INDIRECT

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_CLOSURE = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_OF_TENSORS = frozenset(dir(Tensor))
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF")


@dataclass
class Reads:
    """What a function's code reads by name; functions that are defined within it are part of it.

    ``inspect.getclosurevars`` takes the name of an attribute for a global, so the code is asked.

    Attributes:
        globals: Names of global variables.
        behind: What it reads right behind a variable (``cfg.x``), by the variable.
        whole: Variables that it reads for something else, too (``f(cfg)``, ``c = cfg``).
        attributes: Everything that it reads as an attribute, of whatever it is.
        stored: Globals, closure variables and attributes that it assigns.
        texts: Strings in its code, which may be keys, or names that it looks up by.
        imports: Names of modules that it imports.
        by_text: Whether it takes objects apart by names that it holds as strings.
    """

    globals: set[str] = field(default_factory=set)
    behind: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    by_text: bool = False

    @property
    def takes_apart(self) -> bool:
        return self.by_text or bool(INDIRECT & (self.attributes | self.globals))

    @property
    def deeper(self) -> set[str]:
        """What it may read of what an object holds."""
        return (self.attributes | (self.texts if self.takes_apart else set())) - self.stored

    def of(self, variable: str, deeper: AbstractSet[str]) -> AbstractSet[str]:
        """Return which attributes may be read of a variable, and are not assigned."""
        read = self.behind.get(variable, set())
        is_whole = variable in self.whole or "__dict__" in read
        return (read | deeper if is_whole else read) - self.stored

    def of_arguments(self, code: types.CodeType) -> set[str]:
        """Return what a function reads of what it is handed; ``self`` is followed by itself."""
        arguments = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        arguments -= {"self", "cls"}
        read = {name for each in arguments for name in self.behind.get(each, ())}
        if arguments & self.whole:
            read |= self.deeper - _OF_TENSORS
        return read - self.stored

    def add(self, code: types.CodeType) -> None:
        """Take in the names of a function's code."""
        instructions = list(dis.get_instructions(code))
        for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
            op, name = instruction.opname, instruction.argval
            if op in _ATTRIBUTE:
                self.attributes.add(name)
            elif op == "IMPORT_NAME":
                self.imports.add(name)
            elif op == "IMPORT_FROM":
                self.attributes.add(name)
            elif op in _STORES:
                self.stored.add(name)
            elif op in _GLOBAL or op in _CLOSURE or op.startswith("LOAD_FAST"):
                # Some instructions load two variables; an attribute is read of the last of them.
                name = name[-1] if isinstance(name, tuple) else name
                if op in _GLOBAL:
                    self.globals.add(name)
                if following is not None and following.opname in _ATTRIBUTE:
                    self.behind.setdefault(name, set()).add(following.argval)
                else:
                    self.whole.add(name)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.add(constant)
            for text in constant if isinstance(constant, tuple) else (constant,):
                if isinstance(text, str):
                    self.texts.add(text)
        if "MATCH_CLASS" in {each.opname for each in instructions}:
            self.by_text = True
