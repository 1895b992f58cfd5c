"""Numbers outside of modules that an iteration counts in Python, and decides by."""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from graphfsdp._capture.rules.decisions import Decision, decisions_in, methods_of
from graphfsdp._capture.rules.host_counters import (
    decisions_in_classes,
    differs,
    is_number,
    plain_values,
    refusal,
    refuse_deciding_counters,
)
from graphfsdp._capture.trace.source import is_users_file
from graphfsdp.errors import CaptureError

Reached = tuple[types.FunctionType, object]  # a function, and the object whose method it is
_MAX_ITEMS = 64  # of a container that may hold counters


class OuterCounters:
    """Plain values that functions have by name, before an iteration and behind it.

    See Note [Counters that decide]. Looked at are globals, closure variables and the object of a
    method, and what these hold: items of dicts and lists, attributes of objects. Code is searched
    for tests only where something has changed.
    """

    def __init__(
        self,
        functions: Iterable[Reached],
        modules: Sequence[tuple[str, nn.Module]],
        outside: Iterable[nn.Module],
    ) -> None:
        """Remember the values now.

        Args:
            functions: Whose code the iteration may run.
            modules: The model's, with their paths; what these decide by each other is not looked
                for here.
            outside: Modules that the functions use beside them.
        """
        users = [each for each in functions if is_users_file(each[0].__code__.co_filename)]
        self._before = [(function, owner, _values(function, owner)) for function, owner in users]
        inside = {id(module) for _, module in modules}
        around = dict[int, tuple[str, nn.Module]]()
        for root in outside:
            for path, module in root.named_modules():
                if id(module) not in inside:
                    title = f"{type(root).__name__}.{path}".rstrip(".")
                    around.setdefault(id(module), (title, module))
        self._modules, self._around = list(modules), list(around.values())
        self._plain = [(module, plain_values(module)) for _, module in self._modules]
        self._plain_around = [(module, plain_values(module)) for _, module in self._around]

    def refusals(self) -> Iterator[CaptureError]:
        """Yield a refusal of each value that has changed and decides what runs."""
        modules = [*self._modules, *self._around]
        yield from refuse_deciding_counters(modules, self._plain, self._of_modules)
        yield from refuse_deciding_counters(
            modules,
            self._plain_around,
            lambda: [*decisions_in_classes(each for _, each in modules), *self._of_modules()],
        )
        for function, owner, before in self._before:
            now = _values(function, owner)
            changed = {
                words: (old, now[words][0], holder)
                for words, (old, holder) in before.items()
                if words in now and differs(old, now[words][0])
            }
            for decision in decisions_in(function) if changed else ():
                old, new, holder = changed.get(decision.words, (None, None, None))
                if decision.words in changed and decision.may_turn(old, new, holder):
                    yield refusal(decision.words, decision, old, new, None)
                    break

    def _of_modules(self) -> list[Decision]:
        """Return where functions decide by what may be an attribute of a module."""
        kinds = {type(module) for _, module in (*self._modules, *self._around)}
        methods = {method.__code__ for kind in kinds for _, _, method in methods_of(kind)}
        found: list[Decision] = []
        for function, owner, _ in self._before:
            if function.__code__ in methods:
                continue
            roots = _roots(function, owner)
            for decision in decisions_in(function):
                holder = roots.get(decision.words.removesuffix(f".{decision.name}"))
                if decision.name and isinstance(holder, nn.Module | None):
                    found.append(decision)
        return found


def _values(function: types.FunctionType, owner: object) -> dict[str, tuple[object, object]]:
    """Return plain values by the words with which code reads them, with what holds them."""
    found = dict[str, tuple[object, object]]()
    names = _names_in(function.__code__)
    for root, value in _roots(function, owner).items():
        if is_number(value):
            found[root] = (value, None)
        elif isinstance(value, dict) and dict.__len__(value) <= _MAX_ITEMS:
            for key, item in dict.items(value):  # a class of the user's may have another one
                if is_number(item) and isinstance(key, str | int):
                    found[f"{root}[{key!r}]"] = (item, None)
        elif type(value) is list and len(value) <= _MAX_ITEMS:
            for index, item in enumerate(value):
                if is_number(item):
                    found[f"{root}[{index}]"] = (item, None)
        else:
            attributes = _attributes(value)
            for name in names & attributes.keys():
                if is_number(attributes[name]):
                    found[f"{root}.{name}"] = (attributes[name], value)
    return found


def _roots(function: types.FunctionType, owner: object) -> dict[str, object]:
    """Return what a function has under a name alone: closure variables, globals, its object."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    roots = {name: value for name, cell in cells for value in _contents(cell)}
    table = function.__globals__
    names = _names_in(code)
    roots |= {name: table[name] for name in names if name in table and name not in roots}
    if owner is not None and code.co_argcount:
        roots[code.co_varnames[0]] = owner
    return roots


def _names_in(code: types.CodeType) -> set[str]:
    """Return the global names and attributes of a function, of those within it too."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _attributes(value: object) -> Mapping[str, object]:
    if isinstance(value, nn.Module | Tensor | type | types.FunctionType):
        return {}
    if isinstance(value, types.ModuleType) and not is_users_file(
        getattr(value, "__file__", None) or "<"
    ):
        return {}
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return table if isinstance(table, dict) else {}


def _contents(cell: types.CellType) -> Iterator[object]:
    try:
        yield cell.cell_contents
    except ValueError:  # nothing has been assigned to it yet
        return
