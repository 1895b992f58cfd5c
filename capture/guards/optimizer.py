"""An optimizer's tensors: its state, and the parameters in its groups."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.guards.modules import tensor_places
from graphfsdp._capture.guards.places import Place, differing, in_words, same
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.dtensors import local_part

_LOADED = (
    "load and change the state of an optimizer before the capture; "
    "graphfsdp.optim.FusedAdam loads in place, so its replays go on with what was loaded"
)
_GROUPS = "set up all parameter groups before the capture"

_Group = dict[str, Any]
_State = dict[tuple[int, str], Any]


def optimizer_places(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Place]:
    """Yield what an optimizer in the graph holds.

    After ``load_state_dict`` torch's optimizers hold other tensors: a graph would go on with the
    old ones, and ``state_dict`` would save what no replay has written. ``names``: full names of
    parameters, by id.
    """
    owner, groups, state = type(optimizer).__name__, optimizer.param_groups, optimizer.state
    named: Any = partial(_groups_changes, names)
    yield Place(owner, (getattr, optimizer, "param_groups", None), groups, named, exact=True)
    yield Place(owner, (operator.getitem, (groups,), 0), list(groups), named)
    named = partial(_group_changes, names)
    for index, group in enumerate(groups):
        params, title = group["params"], f"group {index} of {owner}"
        yield Place(title, (dict.get, group, "params", None), params, named, exact=True)
        yield Place(title, (operator.getitem, (params,), 0), list(params), named)
    # In another dict there may be the same; that would have to be watched from then on.
    yield Place("", (getattr, optimizer, "state", None), state, exact=True)
    what = (_state_of, optimizer)
    dicts = [state, *state.values()]
    yield Place("", what, _state_of(optimizer), partial(_state_changes, names), dicts=dicts)
    yield from tensor_places(_named_tensors(state, names), addresses_only=True)


def _state_of(optimizer: torch.optim.Optimizer) -> _State:
    """Return what the state has, by the parameter's id and key; without a key, in which dict."""
    found: _State = {}
    for param, entries in optimizer.state.items():
        found[id(param), ""] = id(entries)
        found |= {(id(param), key): value for key, value in entries.items()}
    return found


def _name_of(number: int, names: Mapping[int, str]) -> str:
    return names.get(number, "a parameter outside of the model")


def _named_tensors(
    state: Mapping[Tensor, Mapping[str, Any]], names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    for param, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"optimizer state {key!r} of {_name_of(id(param), names)!r}", value


def _groups_changes(
    names: Mapping[int, str], owner: str, before: Sequence[_Group], now: Sequence[_Group]
) -> Iterator[Change]:
    if len(now) != len(before):
        words = (f"of {len(before)} groups", f"of {len(now)}")
        yield Change(ChangeKind.GROUPS, f"{owner}.param_groups", *words, _GROUPS)
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        title = f"group {index} of {owner}"
        yield from _group_changes(names, title, old["params"], new["params"])


def _group_changes(
    names: Mapping[int, str], title: str, old: list[Tensor], new: list[Tensor]
) -> Iterator[Change]:
    if list(map(id, old)) != list(map(id, new)):
        words = (_listed(names, old, new), f"{_listed(names, new, old)}, or in another order")
        yield Change(ChangeKind.GROUPS, title, *words, _GROUPS)


def _listed(names: Mapping[int, str], params: list[Tensor], others: list[Tensor]) -> str:
    known = set(map(id, others))
    own = [names.get(id(param), "an unknown one") for param in params if id(param) not in known]
    return f"of {len(params)} parameters" + (f" (with {', '.join(own[:3])})" if own else "")


def _state_changes(
    names: Mapping[int, str], title: str, before: _State, now: _State
) -> Iterator[Change]:
    for (number, key), *values in differing(before, now):
        old, new = (local_part(each) if isinstance(each, Tensor) else each for each in values)
        # The same memory is there after loading what state_dict returned.
        if key and not same(old, new):
            title = f"optimizer state {key!r} of {_name_of(number, names)!r}"
            yield Change(ChangeKind.OPTIMIZER_STATE, title, *in_words(old, new), _LOADED)
