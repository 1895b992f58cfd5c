"""Modules: which there are, what they hold, their mode and their class."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.guards.places import MISSING, Place, are_empty
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.torch_internals import buffers_of, parameters_of

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
NamedModules = Sequence[tuple[str, nn.Module]]
_MODE = operator.itemgetter("training")


def structure(modules: NamedModules) -> Iterator[Place]:
    """Yield the modules, parameters and buffers that modules hold, in their order."""
    for path, module in modules:
        for table, kind in _TABLES:
            live, named = getattr(module, table), partial(_slot_changes, kind)
            # Another table, equal or not, would have to be watched from then on.
            what: tuple[Any, ...] = (getattr, module, table, None)
            yield Place(path, what, live, named, exact=True, dicts=[vars(module)])
            if live:
                items = live.items()
                yield Place(path, (list, items), list(items), named, dicts=[live])
            else:
                yield Place(path, (dict, live), {}, named, cover=are_empty)


def modes(modules: NamedModules) -> Iterator[Place]:
    """Yield the modes of modules: one place, since a parent says it for what is in it."""
    # What torch.compile wraps around a module has that module's mode.
    owners = [(path, vars(module)) for path, module in modules if "training" in vars(module)]
    if not owners:
        return
    paths, tables = zip(*owners, strict=True)
    named = partial(_mode_changes, paths)
    yield Place("", (_modes_of, tables), _modes_of(tables), named, dicts=tables)


def _modes_of(tables: Iterable[dict[str, Any]]) -> list[bool]:
    return list(map(_MODE, tables))


def _mode_changes(
    paths: Sequence[str], title: str, before: Sequence[bool], now: Sequence[bool]
) -> Iterator[Change]:
    rows = zip(paths, before, now, strict=True)
    changed = {path: old for path, old, new in rows if old is not new}
    words = {True: "in train mode", False: "in eval mode"}
    for path, old in changed.items():
        if path and path.rpartition(".")[0] in changed:
            continue  # its parent says it for both
        name = f"module {path!r}" if path else "the model"
        owner = f"model.get_submodule({path!r})" if path else "model"
        remedy = f"call {owner}.{'train' if old else 'eval'}() before the step"
        yield Change(ChangeKind.MODE, name, words[old], words[not old], remedy)


def join(path: str, name: str) -> str:
    """Return the full name of what a module holds."""
    return f"{path}.{name}" if path else name


def weights_of(modules: NamedModules) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of modules, with names for messages."""
    for path, module in modules:
        for kind, table in (("parameter", parameters_of(module)), ("buffer", buffers_of(module))):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{kind} {join(path, name)!r}", tensor


def _slot_changes(kind: str, path: str, old: Any, new: Any) -> Iterator[Change]:
    before, now = dict(old), dict(new)
    names = dict.fromkeys((*before, *now))
    pairs = {name: (before.get(name, MISSING), now.get(name, MISSING)) for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair[0] is not pair[1]}
    for name, pair in changed.items():
        yield _slot_change(kind, join(path, name), *pair)
    if kind == "module" and not changed and list(before) != list(now):
        title = f"the order of the modules in {path!r}" if path else "the module order"
        words = ", ".join(list(before)[:8]), ", ".join(list(now)[:8])
        yield Change(ChangeKind.STRUCTURE, title, *words, "order modules before the capture")


def _slot_change(kind: str, path: str, old: Any, new: Any) -> Change:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        remedy = "write into the old one (copy_, load_state_dict without assign=True)"
        words = "one tensor", "another one, in other memory"
    else:
        remedy = f"change the {kind}s of a model before its capture"
        words = _kind_of(old), _kind_of(new)
        if words[0] == words[1]:
            words = words[0], f"{words[1]}, another one"
    return Change(ChangeKind.STRUCTURE, f"{kind} {path!r}", *words, remedy)


def _kind_of(value: object) -> str:
    if value is MISSING:
        return "absent"
    return "None" if value is None else f"a {type(value).__name__}"
