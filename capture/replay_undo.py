"""Undoes a replay on a CPU that failed before it wrote weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphfsdp._capture.backend import Effect


class ReplayUndo:
    """What a replay writes before its commit point, as it was (see Note [Undo of a replay]).

    Attributes:
        effect: What the last replay has done.
    """

    effect: Effect

    def __init__(self, kept: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        """Prepare.

        Args:
            kept: Small tensors that a replay writes before its commit point.
            generators: Generators that it draws from before it.
        """
        self._kept = list(kept)
        self._copies = [torch.empty_like(tensor) for tensor in kept]
        self._generators = list(generators)
        self._states: list[Tensor] = []
        self.effect = Effect.NONE

    def begin(self) -> None:
        """Copy; called before each replay."""
        if self._kept:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._kept)
        self._states = [generator.get_state() for generator in self._generators]
        self.effect = Effect.NONE

    def commit(self) -> None:
        """Give up: what is written from here on cannot be put back."""
        self.effect = Effect.PART

    def roll_back(self) -> None:
        """Put everything back, unless it is too late."""
        if self.effect is not Effect.NONE:
            return
        if self._kept:
            torch._foreach_copy_(self._kept, self._copies)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


__all__ = ["ReplayUndo"]
