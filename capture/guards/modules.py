"""Modules and tensors: which there are, modes, memory, shapes, what requires a gradient."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from graphfsdp._capture.guards.places import Ask, Place, are_empty, change_of, differing
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.torch_internals import buffers_of, parameters_of

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
NamedModules = Sequence[tuple[str, nn.Module]]
_MODE = operator.itemgetter("training")
_PLAIN = (Tensor, nn.Parameter)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_MOVED = (
    "copy new values in place (copy_, fill_, load_state_dict), which replays see, instead of "
    ".to(), .data = ... or load_state_dict(assign=True)"
)


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
    changed = list(differing(before, now))
    for name, *values in changed:
        change = change_of(f"{kind} {join(path, name)!r}", *values)
        yield replace(change, kind=ChangeKind.STRUCTURE)
    if kind == "module" and not changed and list(before) != list(now):
        title = f"the order of the modules in {path!r}" if path else "the module order"
        words = ", ".join(list(before)[:8]), ", ".join(list(now)[:8])
        yield Change(ChangeKind.STRUCTURE, title, *words, "order modules before the capture")


def tensor_places(
    named: Iterable[tuple[str, Tensor]], *, addresses_only: bool = False
) -> Iterator[Place]:
    """Yield what a graph has baked in of tensors.

    Args:
        named: Tensors with their names for messages; a tensor may come several times.
        addresses_only: Their shapes and flags do not matter to a replay.
    """
    unique = {id(tensor): (name, tensor) for name, tensor in reversed(list(named))}
    for name, tensor in reversed(unique.values()):
        yield from _places_of(name, tensor, addresses_only)


def _places_of(name: str, tensor: Tensor, addresses_only: bool) -> Iterator[Place]:
    if type(tensor) in _PLAIN:
        if tensor.layout is torch.strided and not tensor.is_meta:
            yield Place(name, (Tensor.data_ptr, tensor), tensor.data_ptr(), _moved)
            if not addresses_only:
                known = _layout(tensor)
                yield Place(name, (_layout, tensor), known, _layout_changes, cover=_by_torch)
        return
    for attribute, inner in _inner_tensors(tensor):
        what = (getattr, tensor, attribute, None)
        yield Place(name, what, inner, _other_rows, exact=True)
        yield from _places_of(name, inner, addresses_only)
    if not addresses_only:
        required = tensor.requires_grad
        yield Place(name, (_REQUIRES_GRAD, tensor), required, _requires_grad, exact=True)


def _by_torch(tensors: list[Any]) -> Ask:
    """Ask one of torch's own guards for all layouts.

    It objects also to modes that are on or off unlike now (autocast, and those that watch a
    recording); then it is made anew, where replays run.
    """
    guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Ask((operator.call, [partial(guard.check, *tensors)]), [True])


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _inner_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor that wraps others (a DTensor) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor lists its mesh as well
                yield name, inner


def _layout_changes(name: str, before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[Change]:
    fields = zip(("shape", "stride", "dtype"), before, now, strict=False)
    for field, old, new in fields:
        if old != new:
            yield Change(ChangeKind.LAYOUT, name, f"of {field} {old}", f"of {field} {new}", _MOVED)
    if before[-1] != now[-1]:
        yield from _requires_grad(name, before[-1], now[-1])


def _requires_grad(name: str, before: bool, now: bool) -> Iterator[Change]:
    words = {True: "trained (requires_grad=True)", False: "frozen (requires_grad=False)"}
    remedy = f"requires_grad_({before}) again"
    yield Change(ChangeKind.REQUIRES_GRAD, name, words[before], words[now], remedy)


def _other_rows(name: str, old: Tensor, new: Tensor) -> Iterator[Change]:
    yield from _moved(name, old.data_ptr(), new.data_ptr())


def _moved(name: str, old: int, new: int) -> Iterator[Change]:
    words = f"at address {old:#x}", f"in other memory, at {new:#x}"
    yield Change(ChangeKind.ADDRESS, name, *words, _MOVED)
