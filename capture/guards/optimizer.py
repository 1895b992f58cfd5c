"""Guard of the optimizer's tensors: its state, and the parameters in its groups."""

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.guards.asks import Ask
from graphfsdp._capture.guards.tensors import TensorGuard
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.dtensors import local_part

_GET_PARAMS = operator.itemgetter("params")
_LOADED = (
    "load and change the state of an optimizer before the capture; "
    "graphfsdp.optim.FusedAdam loads in place, so its replays go on with what was loaded"
)
_GROUPS = "set up all parameter groups before the capture"


class OptimizerGuard:
    """Notices state that was replaced, dropped or moved, and parameters that joined or left.

    After ``load_state_dict`` torch's optimizers hold other tensors: a graph would go on with the
    old ones, and ``state_dict`` would save what no replay has written.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        counts: Callable[[str], bool],
    ) -> None:
        """Remember the state now.

        Args:
            optimizer: In the graph.
            names: Full names of parameters, by id.
            counts: Tells whether replays go on with a number that its state has under a key.
        """
        self._optimizer = optimizer
        self._counts = counts
        self._names = names
        self._arm()

    def asks(self) -> Iterator[Ask]:
        """Yield questions for what it holds, for the dicts and lists in there, for tensors."""
        now, own, state = self._optimizer, vars(self._optimizer), self._state
        names = ("state", "param_groups", "step")
        what: tuple[Any, ...] = (getattr, (now, now, type(now)), names, [None] * len(names))
        known = [state, self._groups, self._class_step]
        yield Ask(what, known, exact=True)
        yield Ask((dict.get, [own], ["step"], [None]), [self._own_step], exact=True)
        lists = [group["params"] for group in self._groups]
        sizes = list(map(len, [self._params, *self._params]))
        yield Ask((len, [self._groups, *lists]), sizes)
        yield Ask((_GET_PARAMS, list(self._groups)), lists, exact=True)
        places = [(live, index) for live in lists for index in range(len(live))]
        what = (operator.getitem, [live for live, _ in places], [index for _, index in places])
        yield Ask(what, list(chain.from_iterable(self._params)), exact=True)
        values = list(state.values())
        if isinstance(state, dict):  # other dicts would have to be watched from then on
            what = (dict.get, [state] * len(values), self._owners, [None] * len(values))
            yield Ask(what, values, exact=True, dicts=[state])
        yield Ask((self._values_of, [state]), [self._values], dicts=[state, *values])
        yield from self._tensors.asks()

    def changes(self) -> list[Change]:
        """Compare each entry and name what has changed."""
        found = [*self._step_changes(), *self._group_changes()]
        before = dict(zip(map(id, self._owners), self._values, strict=True))
        now = dict(
            zip(map(id, self._optimizer.state), self._values_of(self._optimizer.state), strict=True)
        )
        for key in dict.fromkeys((*before, *now)):
            name = self._names.get(key, "a parameter outside of the model")
            found += _state_changes(name, before.get(key, {}), now.get(key, {}))
        found += self._tensors.changes()
        if not found:
            self._arm()  # the same tensors in other containers
        return found

    def _arm(self) -> None:
        self._own_step = vars(self._optimizer).get("step")
        self._class_step = type(self._optimizer).step
        self._state = self._optimizer.state
        self._groups = self._optimizer.param_groups
        self._params = [list(group["params"]) for group in self._groups]
        self._owners = list(self._state)
        self._values = self._values_of(self._state)
        self._tensors = TensorGuard(self._named_tensors(), addresses_only=True)

    def _values_of(self, state: Mapping[Any, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return each parameter's state, without the numbers that it counts."""
        return [
            {key: value for key, value in entries.items() if not self._counts(key)}
            for entries in state.values()
        ]

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for param, values in self._state.items():
            name = self._names.get(id(param), "a parameter outside of the model")
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield f"optimizer state {key!r} of {name!r}", value

    def _step_changes(self) -> Iterator[Change]:
        now, name = self._optimizer, f"{type(self._optimizer).__name__}.step"
        own = vars(now).get("step")
        is_known = own is self._own_step or _counts(own, self._class_step, self._own_step)
        if type(now).step is not self._class_step or not is_known:
            words = ("one function", "another one")
            yield Change(ChangeKind.ATTRIBUTE, name, *words, "replace it before the capture")

    def _group_changes(self) -> Iterator[Change]:
        groups = [group["params"] for group in self._optimizer.param_groups]
        owner = type(self._optimizer).__name__
        if len(groups) != len(self._params):
            words = (f"of {len(self._params)} groups", f"of {len(groups)}")
            yield Change(ChangeKind.GROUPS, f"{owner}.param_groups", *words, _GROUPS)
        for index, (old, new) in enumerate(zip(self._params, groups, strict=False)):
            if list(map(id, old)) != list(map(id, new)):
                words = (_listed(self._names, old, new), _listed(self._names, new, old))
                title = f"group {index} of {owner}"
                yield Change(ChangeKind.GROUPS, title, *words, _GROUPS)


def _counts(own: object, *steps: object) -> bool:
    """Tell whether a step is what a scheduler has wrapped one of these in, to count its calls."""
    return hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) in steps


def _listed(names: Mapping[int, str], params: list[Tensor], others: list[Tensor]) -> str:
    known = set(map(id, others))
    own = [names.get(id(param), "an unknown one") for param in params if id(param) not in known]
    return f"of {len(params)} parameters" + (f" (with {', '.join(own[:3])})" if own else "")


def _state_changes(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Change]:
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        title = f"optimizer state {key!r} of {name!r}"
        if old is new:
            continue
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if local_part(old).data_ptr() == local_part(new).data_ptr():
                continue  # the same memory, as after loading what state_dict returned
            words = ("one tensor", "another one, in other memory (load_state_dict)")
        elif isinstance(old, Tensor) or isinstance(new, Tensor):
            words = ("absent", "there") if old is None else ("there", "gone")
        elif type(old) is type(new) and bool(old == new):
            continue
        else:
            words = (repr(old), repr(new))
        yield Change(ChangeKind.OPTIMIZER_STATE, title, *words, _LOADED)
