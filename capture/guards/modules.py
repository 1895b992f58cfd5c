"""Guards of modules: which there are, what they hold, their mode and their class."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.guards.asks import MISSING, Ask
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.torch_internals import children_of

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
NamedModules = Sequence[tuple[str, nn.Module]]
_REMEDY = "give a module its class before the capture"


class StructureGuard:
    """Notices modules, parameters and buffers that were added, removed or replaced."""

    def __init__(self, modules: NamedModules) -> None:
        self._before = [
            (path, module, table, kind, dict(getattr(module, table)))
            for path, module in modules
            for table, kind in _TABLES
        ]

    def asks(self) -> Iterator[Ask]:
        """Yield questions for the tables, and for what they hold, in its order."""
        modules = [module for _, module, *_ in self._before]
        names = [table for _, _, table, *_ in self._before]
        live = list(map(getattr, modules, names))
        # Other tables, equal or not, would have to be watched from then on.
        what = (getattr, modules, names, [None] * len(names))
        yield Ask(what, live, exact=True, dicts=list(map(vars, modules)))
        filled = [table for table in live if table]
        items = [table.items() for table in filled]
        yield Ask((list, items), list(map(list, items)), dicts=filled)
        yield Ask((any, [[table for table in live if not table]]), [False], exact=True)

    def changes(self) -> list[Change]:
        """Compare each table of each module and name what has changed."""
        found = []
        for path, module, table, kind, before in self._before:
            now = getattr(module, table)
            for name in dict.fromkeys((*before, *now)):
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if old is not new:
                    found.append(_slot_change(kind, join(path, name), old, new))
        return found or [
            _order_change(path, before, children_of(module))
            for path, module, table, _, before in self._before
            if table == "_modules" and list(before) != list(children_of(module))
        ]


class ModeGuard:
    """Notices a changed mode, and another class, of modules."""

    def __init__(self, modules: NamedModules, heeds: Callable[[nn.Module], bool]) -> None:
        """Remember them now.

        Args:
            modules: Those of the model, or others.
            heeds: Tells whether the mode of a module matters.
        """
        self._modules = modules
        self._types = [type(module) for _, module in self._modules]
        self._modes: dict[str, tuple[dict[str, Any], bool]] = {
            path: (vars(module), module.training) for path, module in modules if heeds(module)
        }

    def asks(self) -> Iterator[Ask]:
        """Yield questions for classes and modes."""
        yield Ask((type, [module for _, module in self._modules]), self._types, exact=True)
        holders, modes = [h for h, _ in self._modes.values()], [m for _, m in self._modes.values()]
        yield Ask((operator.itemgetter("training"), holders), modes, dicts=holders)

    def changes(self) -> list[Change]:
        """Compare each and name what has changed."""
        found = list(self._mode_changes())
        for (path, module), known in zip(self._modules, self._types, strict=True):
            if type(module) is not known:
                what = f"the class of {path!r}" if path else "the model's class"
                words = known.__name__, type(module).__name__
                found.append(Change(ChangeKind.ATTRIBUTE, what, *words, _REMEDY))
        return found

    def _mode_changes(self) -> Iterator[Change]:
        changed = {
            path: old
            for path, (holder, old) in self._modes.items()
            if holder.get("training") is not old
        }
        words = {True: "in train mode", False: "in eval mode"}
        for path, old in changed.items():
            if path and path.rpartition(".")[0] in changed:
                continue  # its parent says it for both
            below = f"{path}." if path else ""
            num_below = sum(name != path and name.startswith(below) for name in changed)
            name = f"module {path!r}" if path else "the model"
            if num_below:
                name += f" (with {num_below} modules in it)"
            call = f"{path or 'model'}.{'train' if old else 'eval'}()"
            remedy = f"call {call} before the step (validation in between is fine)"
            yield Change(ChangeKind.MODE, name, words[old], words[not old], remedy)


def join(path: str, name: str) -> str:
    """Return the full name of what a module holds."""
    return f"{path}.{name}" if path else name


def _slot_change(kind: str, path: str, old: Any, new: Any) -> Change:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        remedy = "write into the old one (copy_, load_state_dict without assign=True)"
        words = "one tensor", "another one, in other memory"
    else:
        remedy = f"change the {kind}s of a model before its capture"
        words = _kind_of(old), _kind_of(new)
        if isinstance(new, nn.Module) and type(new) is type(old):
            words = f"a {_head_of(old)}", f"another object, a {_head_of(new)}"
            remedy += "; give this one other weights in place (load_state_dict, copy_)"
    return Change(ChangeKind.STRUCTURE, f"{kind} {path!r}", *words, remedy)


def _order_change(path: str, before: Iterable[str], now: Iterable[str]) -> Change:
    title = f"the order of the modules in {path!r}" if path else "the module order"
    words = ", ".join(list(before)[:8]), ", ".join(list(now)[:8])
    return Change(ChangeKind.STRUCTURE, title, *words, "order modules before the capture")


def _head_of(module: nn.Module) -> str:
    """Return a module's class and settings, as it prints them."""
    return f"{type(module).__name__}({module.extra_repr()})"


def _kind_of(value: object) -> str:
    if value is MISSING:
        return "absent"
    return "None" if value is None else f"a {type(value).__name__}"
