"""What code reads by name: the code of a function, and all code that ran."""

import dis
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.trace.source import Ran, is_installed_file

# With one of these in it, code may look up by strings what it reads.
INDIRECT = frozenset(
    ("globals", "modules", "getattr", "hasattr", "vars", "__dict__", "asdict", "astuple")
)
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_CLOSURE = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_SETTING = ("STORE_ATTR", "DELETE_ATTR")  # which read nothing of what they change
_OF_TENSORS = frozenset(dir(Tensor))
OF_PYTHON = (nn.Module, torch.optim.Optimizer, object, type)  # whose own code reads itself
Names = Mapping[str, AbstractSet[str]]  # what is read of an object, and of what that holds


@dataclass
class Reads:
    """What a function's code reads by name; functions that are defined within it are part of it.

    ``inspect.getclosurevars`` takes the name of an attribute for a global, so the code is asked.

    Attributes:
        globals: Names of global variables.
        behind: What it reads right behind a variable (``cfg.x``), by the variable.
        whole: Variables that it reads for something else, too (``f(cfg)``, ``c = cfg``).
        attributes: Everything that it reads as an attribute, of whatever it is.
        texts: Strings in its code, which may be keys, or names that it looks up by.
        imports: Names of modules that it imports.
    """

    globals: set[str] = field(default_factory=set)
    behind: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)

    @property
    def takes_apart(self) -> bool:
        return bool(INDIRECT & (self.attributes | self.globals))

    @property
    def deeper(self) -> set[str]:
        """What it may read of what an object holds."""
        return self.attributes | (self.texts if self.takes_apart else set())

    def of(self, variable: str, deeper: AbstractSet[str]) -> AbstractSet[str]:
        """Return which attributes may be read of a variable."""
        read = self.behind.get(variable, set())
        is_whole = variable in self.whole or "__dict__" in read
        return read | deeper if is_whole else read

    def read_of_arguments(self, code: types.CodeType) -> set[str]:
        """Return what a function reads of what it is handed; ``self`` is followed by itself."""
        arguments = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        arguments -= {"self", "cls"}
        read = {name for each in arguments for name in self.behind.get(each, ())}
        if arguments & self.whole or "__dict__" in read:
            read |= self.deeper - _OF_TENSORS
        return read

    def add(self, code: types.CodeType) -> None:
        """Take in the names of a function's code."""
        # `self.calls += 1` reads an attribute of a copy of `self` on the stack.
        instructions = [each for each in dis.get_instructions(code) if each.opname != "COPY"]
        for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
            op, name = instruction.opname, instruction.argval
            if op in _ATTRIBUTE:
                self.attributes.add(name)
            elif op == "IMPORT_NAME":
                self.imports.add(name)
            elif op == "IMPORT_FROM":
                self.attributes.add(name)
            elif op in _GLOBAL or op in _CLOSURE or "LOAD_FAST" in op:
                # Python 3.13 has instructions that load two variables, or store one and load
                # another; an attribute is read of the last of them.
                *others, name = name if isinstance(name, tuple) else (name,)
                if op.startswith("LOAD_FAST"):
                    self.whole.update(others)
                if op in _GLOBAL:
                    self.globals.add(name)
                if following is not None and following.opname in _ATTRIBUTE:
                    self.behind.setdefault(name, set()).add(following.argval)
                elif following is None or following.opname not in _SETTING:
                    self.whole.add(name)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.add(constant)
            for text in constant if isinstance(constant, tuple) else (constant,):
                if isinstance(text, str):
                    self.texts.add(text)


def functions_of(member: Any) -> list[Any]:
    """Return the functions that run when somebody uses what a class has under a name.

    Of a method, a property, and what functools makes for classes; empty for data.
    """
    if isinstance(member, (classmethod, staticmethod)):
        return functions_of(member.__func__)
    if isinstance(member, property):
        return [] if member.fget is None else functions_of(member.fget)
    if isinstance(member, functools.cached_property):
        return functions_of(member.func)
    if isinstance(member, types.FunctionType) or hasattr(member, "__wrapped__"):
        return [member]
    return []


class ReadNames:
    """What the code that ran reads by name.

    Attributes:
        codes: All that is not graphfsdp's own.
        handed: What any function of users reads of what it is handed.
        texts: Strings in users' code, by which it may look up.
    """

    def __init__(self, ran: Ran) -> None:
        self.ran = ran
        self._num_codes = -1
        self._known: dict[types.CodeType, Reads] = {}
        self._living: dict[types.CodeType, list[weakref.ref[types.FunctionType]]] = {}
        self.codes: AbstractSet[types.CodeType] = frozenset()
        self.handed: set[str] = set()
        self.texts: set[str] = set()
        self._read_of_classes: dict[type, Names] = {}

    def follow(self) -> None:
        """Take in what has run since."""
        if len(self.ran.codes) == self._num_codes:
            return
        self.ran.codes |= _autograds(self.ran.codes)
        self._num_codes = len(self.ran.codes)
        self.codes = self.ran.not_ours()
        near = {code: self.of(code) for code in self.ran.near()}
        self.texts |= {text for each in near.values() for text in each.texts if text.isidentifier()}
        read = (each.read_of_arguments(code) for code, each in near.items())
        self.handed |= set().union(*read)
        self._read_of_classes.clear()

    def functions(self, met: AbstractSet[types.CodeType]) -> Iterator[types.FunctionType]:
        """Yield the living functions that ran of what users wrote, and were not met yet."""
        codes = {code for code in self.ran.near() if not _is_made_by_python(code)}
        new = codes - met - self._living.keys()
        self._living |= {code: [] for code in new}
        # What others among them have made has no variables but theirs, which their names cover.
        made = {inner for code in codes for inner in code.co_consts if inner in new}
        for living in self._search(new - made):
            self._living[living.__code__].append(weakref.ref(living))
        for code in sorted(codes - met, key=_position):  # titles are by order
            for reference in self._living[code]:
                function = reference()
                if function is not None:
                    yield function

    @staticmethod
    def _search(codes: set[types.CodeType]) -> list[types.FunctionType]:
        found = list(_named(codes))
        rest = codes - {each.__code__ for each in found}
        if rest:  # closures, and what a decorator hides; a look at all objects takes 50 ms
            found += [
                each
                for each in gc.get_objects()
                if type(each) is types.FunctionType and each.__code__ in rest
            ]
        return found

    def of(self, code: types.CodeType) -> Reads:
        if code not in self._known:
            self._known[code] = Reads()
            self._known[code].add(code)
        return self._known[code]

    def deeper(self, code: types.CodeType, texts: Iterable[str] = ()) -> AbstractSet[str]:
        """Return what code may read of what an object holds, by itself or where it hands that."""
        reads = self.of(code)
        if is_installed_file(code.co_filename):
            return reads.deeper
        by_text = self.texts.union(texts) if reads.takes_apart else frozenset()
        return reads.deeper | self.handed | by_text

    def read_of_class(self, kind: type) -> Names:
        """Return what the methods that ran read of an object of this class."""
        if kind not in self._read_of_classes:
            found: dict[str, set[str]] = {}
            for function in self._methods(kind):
                code = function.__code__
                deeper = self.deeper(code)
                for name in self.of(code).of(code.co_varnames[0], deeper):
                    found.setdefault(name, set()).update(deeper)
            self._read_of_classes[kind] = found
        return self._read_of_classes[kind]

    def _methods(self, kind: type) -> Iterator[types.FunctionType]:
        for base in kind.__mro__:
            for member in () if base in OF_PYTHON else vars(base).values():
                for function in functions_of(member):
                    inner: Any = inspect.unwrap(function)
                    code = getattr(inner, "__code__", None)
                    if isinstance(code, types.CodeType) and code in self.codes and code.co_argcount:
                        yield inner


def _position(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


def _named(codes: AbstractSet[types.CodeType]) -> Iterator[types.FunctionType]:
    """Yield the functions of modules, and the methods of their classes, that have these codes."""
    by_file: dict[str, list[types.CodeType]] = {}
    for code in codes:
        by_file.setdefault(code.co_filename, []).append(code)
    for module in list(sys.modules.values()):
        for code in by_file.get(getattr(module, "__file__", None) or "", ()):
            found: Any = module
            for part in code.co_qualname.split("."):
                found = vars(found).get(part) if hasattr(found, "__dict__") else None
            for function in functions_of(found):
                inner = inspect.unwrap(function)
                if isinstance(inner, types.FunctionType) and inner.__code__ is code:
                    yield inner


def _is_made_by_python(code: types.CodeType) -> bool:
    """Tell whether Python's library has made this for a named tuple or a dataclass."""
    of_tuple = code.co_name == "<lambda>" and code.co_varnames[:1] == ("_cls",)
    return of_tuple or "__create_fn__" in code.co_qualname


def _autograds(codes: AbstractSet[types.CodeType]) -> set[types.CodeType]:
    """Return the backward passes of functions whose forward pass is among the codes.

    On a GPU they begin on a thread of autograd's, ahead of any hook there.
    """
    found: set[types.CodeType] = set()
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
        if getattr(kind.forward, "__code__", None) in codes:
            code = getattr(inspect.unwrap(kind.backward), "__code__", None)
            found |= {code} if isinstance(code, types.CodeType) else set()
    return found
