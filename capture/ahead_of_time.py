"""Optimizer state for a capture before the first batch, on made-up data."""

from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.capturable import Restartable

_State = dict[str, Any]


class FirstStates:
    """Optimizer state that an ahead-of-time capture has made, and that the graph writes.

    Note [State before the first step]: the graph has the addresses of state that optimizers made
    on the example batch. An optimizer that knows how state begins (FusedAdam) gives it these
    values. Of any other, only its own first step knows: so the first real iteration runs eagerly,
    without state, as it would have, and what it has made is then moved to where the graph is.
    """

    def __init__(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self._had = [(optimizer, set(optimizer.state)) for optimizer in optimizers]
        self._made: list[tuple[torch.optim.Optimizer, dict[Tensor, _State]]] = []

    def note(self) -> None:
        """Note what was made since; it is about to be undone."""
        for optimizer, had in self._had:
            made = {param: state for param, state in optimizer.state.items() if param not in had}
            if made:
                self._made.append((optimizer, made))

    def put_back(self) -> bool:
        """Give optimizers their state where they know its values; tell whether others wait."""
        waiting = []
        for optimizer, made in self._made:
            if isinstance(optimizer, Restartable):
                optimizer.state.update(made)
                optimizer.restart_states(made)
            else:
                waiting.append((optimizer, made))
        self._made = waiting
        return bool(waiting)

    def adopt(self) -> bool:
        """Move what the first eager iteration has made to where the graph writes.

        False if it made other state than on the example batch: the graph is of no use then.
        """
        for optimizer, made in self._made:
            new = {param: state for param, state in optimizer.state.items() if param in made}
            if new.keys() != made.keys() or len(optimizer.state) != len(new):
                return False
            for param, state in new.items():
                if not _move(state, made[param]):
                    return False
            optimizer.state.update(made)
        return True


def _move(state: _State, target: _State) -> bool:
    if state.keys() != target.keys():
        return False
    for key, value in state.items():
        old = target[key]
        if not isinstance(value, Tensor) or not isinstance(old, Tensor):
            target[key] = value
        elif value.shape != old.shape or value.dtype != old.dtype:
            return False
        else:
            old.copy_(value)
    return True
