"""Modules, tensors and hooks: which there are, modes, memory, shapes, what requires a gradient."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from graphfsdp._capture.guards.places import MISSING, Ask, Place, are_empty, change_of, differing
from graphfsdp.base.torch_internals import buffers_of, parameters_of
from graphfsdp.errors import Change, ChangeKind

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
NamedModules = Sequence[tuple[str, nn.Module]]
_MODE = operator.itemgetter("training")
_PLAIN = (Tensor, nn.Parameter)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_MOVED = (
    "copy new values in place (copy_, fill_, load_state_dict), which replays see, instead of "
    ".to(), .data = ... or load_state_dict(assign=True)"
)
_MODULE_HOOKS = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
)
_PARAM_HOOKS = (
    ("_backward_hooks", "gradient hook"),
    ("_post_accumulate_grad_hooks", "post-accumulate-grad hook"),
)
_STEP_HOOKS = (("pre_hooks", "step pre-hook"), ("post_hooks", "step post-hook"))
_OURS = "graphfsdp."

Hooks = dict[int, Callable[..., Any]]


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


@dataclass(frozen=True)
class Table:
    """One dict of hooks as torch keeps it.

    Attributes:
        holder: A module, parameter or optimizer, or the module of Python that has global ones.
        attribute: Where the holder keeps the dict; a tensor without hooks has None there.
        kind: What hooks they are.
        owner: What they are registered on, for messages.
    """

    holder: Any
    attribute: str
    kind: str
    owner: str

    @property
    def hooks(self) -> Hooks:
        """The hooks as they are now; the live dict, where there is one.

        An optimizer that wraps another one may never have called ``Optimizer.__init__``.
        """
        hooks: Hooks | None = getattr(self.holder, self.attribute, None)
        return {} if hooks is None else hooks


def hook_places(tables: Iterable[Table]) -> Iterator[Place]:
    """Yield the hooks of tables: a replay would not run new ones, or go on with those that went.

    Hooks on saving and loading state are none of an iteration's business. Nor are those of
    graphfsdp itself: another captured step over the same parameters has its own.

    Note [Hook numbers]: each hook that torch registers, of whatever kind, takes the next number
    of one counter. While that stands still nothing was added anywhere, and only dicts that had
    hooks in them can have lost some: no need to look at a dict for each parameter. Hooks that were
    written into torch's private dicts by hand are seen once the counter moves.
    """
    for table in tables:
        live, named = table.hooks, partial(_hook_changes, table)
        known = dict(live)
        yield Place("", (_copy_of, table), known, named, cover=_by_number)
        if not all(map(_is_ours, known.values())):
            yield Place("", (dict, live), known, named, dicts=[live])


def _copy_of(table: Table) -> Hooks:
    return dict(table.hooks)


def _by_number(tables: list[Any]) -> Ask:
    counter = (getattr, [RemovableHandle], ["next_id"], [None])
    return Ask(counter, [RemovableHandle.next_id], exact=True)


def _hook_changes(table: Table, title: str, before: Hooks, now: Hooks) -> Iterator[Change]:
    for _, old, new in differing(before, now):
        hook = new if old is MISSING else old
        if _is_ours(hook):
            continue
        plain = _plain(hook)
        name = getattr(plain, "__qualname__", type(plain).__qualname__)
        code = getattr(plain, "__code__", None)
        where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
        words = ("registered", "removed") if new is MISSING else ("absent", "registered")
        remedy = "remove it, or register hooks before the capture"
        remedy = "put it back" if new is MISSING else remedy
        title = f"{table.kind} {name!r}{where} of {table.owner}"
        yield Change(ChangeKind.HOOK, title, *words, remedy)


def tables_of_modules(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Table]:
    for path, module in modules:
        owner = f"module {path!r}" if path else "the model"
        for attribute, kind in _MODULE_HOOKS:
            yield Table(module, attribute, kind, owner)


def tables_of(
    model: nn.Module,
    named_params: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[Table]:
    """Yield where all hooks lie that an iteration calls; ``optimizers`` step inside the graph."""
    yield from tables_of_modules(model.named_modules())
    for attribute, kind in _MODULE_HOOKS:
        yield Table(torch_module, f"_global{attribute}", kind, "all modules")
    for name, param in named_params.items():
        for attribute, kind in _PARAM_HOOKS:
            yield Table(param, attribute, kind, f"parameter {name!r}")
    for optimizer in optimizers:
        for suffix, kind in _STEP_HOOKS:
            owner = type(optimizer).__name__
            yield Table(optimizer, f"_optimizer_step_{suffix}", kind, owner)
            yield Table(torch_optimizer, f"_global_optimizer_{suffix}", kind, "all optimizers")


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(_plain(hook), "__module__", "")).startswith(_OURS)


def _plain(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def users_hooks(tables: Iterable[Table]) -> list[Callable[..., Any]]:
    """Return all hooks of tables, without our own."""
    found = [hook for table in tables for hook in table.hooks.values() if not _is_ours(hook)]
    return list({id(hook): hook for hook in found}.values())
