"""Hooks: those of modules, of parameters, of the optimizer, and the global ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from graphfsdp._capture.guards.places import MISSING, Ask, Place, differing
from graphfsdp.base.changes import Change, ChangeKind

_MODULE_TABLES = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
)
_PARAM_TABLES = (
    ("_backward_hooks", "gradient hook"),
    ("_post_accumulate_grad_hooks", "post-accumulate-grad hook"),
)
_STEP_TABLES = (("pre_hooks", "step pre-hook"), ("post_hooks", "step post-hook"))
_OURS = "graphfsdp."

Hooks = dict[int, Callable[..., Any]]


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
        live, named = table.hooks, partial(_changes, table)
        known = dict(live)
        yield Place("", (_copy_of, table), known, named, cover=_by_number)
        if not all(map(_is_ours, known.values())):
            yield Place("", (dict, live), known, named, dicts=[live])


def _copy_of(table: Table) -> Hooks:
    return dict(table.hooks)


def _by_number(tables: list[Any]) -> Ask:
    counter = (getattr, [RemovableHandle], ["next_id"], [None])
    return Ask(counter, [RemovableHandle.next_id], exact=True)


def _changes(table: Table, title: str, before: Hooks, now: Hooks) -> Iterator[Change]:
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
        for attribute, kind in _MODULE_TABLES:
            yield Table(module, attribute, kind, owner)


def tables_of(
    model: nn.Module,
    named_params: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[Table]:
    """Yield where all hooks lie that an iteration calls; ``optimizers`` step inside the graph."""
    yield from tables_of_modules(model.named_modules())
    for attribute, kind in _MODULE_TABLES:
        yield Table(torch_module, f"_global{attribute}", kind, "all modules")
    for name, param in named_params.items():
        for attribute, kind in _PARAM_TABLES:
            yield Table(param, attribute, kind, f"parameter {name!r}")
    for optimizer in optimizers:
        for suffix, kind in _STEP_TABLES:
            owner = type(optimizer).__name__
            yield Table(optimizer, f"_optimizer_step_{suffix}", kind, owner)
            yield Table(torch_optimizer, f"_global_optimizer_{suffix}", kind, "all optimizers")


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(_plain(hook), "__module__", "")).startswith(_OURS)


def _plain(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def users_hooks(
    model: nn.Module,
    named_params: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[Callable[..., Any]]:
    """Return all hooks that an iteration calls, without our own."""
    tables = tables_of(model, named_params, optimizers)
    found = [hook for table in tables for hook in table.hooks.values() if not _is_ours(hook)]
    return list({id(hook): hook for hook in found}.values())
