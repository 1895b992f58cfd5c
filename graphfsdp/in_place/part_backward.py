"""Gradients on their way through a part: where they lie, and a graph of the way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphfsdp._capture.trace.backend import Graph


class NotAPartError(Exception):
    """Why a module runs as it is written."""


class Arrivals:
    """What comes of each use of one leaf, in the order of arrival."""

    def __init__(self, place: int) -> None:
        self.place = place
        self._found: list[Tensor] = []

    def begin(self) -> None:
        self._found = []

    def add(self, index: int, grad_inputs: Sequence[Tensor | None], _: object) -> None:
        grad = grad_inputs[index]
        if grad is not None:
            self._found.append(grad)

    def taken(self) -> list[Tensor]:
        found, self._found = self._found, []
        return found


class StaticGradient:
    """A gradient at a fixed address, in the form in which the loop's comes.

    One that is the same along a dim, as that of a sum, has one element there.
    """

    def __init__(self, grad: Tensor) -> None:
        self._same = [dim for dim, step in enumerate(grad.stride()) if not step]
        self._base = torch.empty_like(self._narrow(grad))
        self.tensor = self._base.expand(grad.shape)
        if self.tensor.stride() != grad.stride():
            raise NotAPartError("a gradient comes in a form that is not dense")

    def _narrow(self, grad: Tensor) -> Tensor:
        for dim in self._same:
            grad = grad.narrow(dim, 0, min(1, grad.size(dim)))
        return grad

    def load(self, grad: Tensor) -> None:
        self._base.copy_(self._narrow(grad))


@dataclass(frozen=True)
class BackwardGraph:
    """A graph of the backward pass, and for which edges it has gradients."""

    graph: Graph
    grads: Sequence[StaticGradient]
    is_there: Sequence[bool]

    def run(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        with torch.no_grad():
            for each, grad in zip(self.grads, grads, strict=True):
                each.load(grad)
        return self.spread(self.graph.replay())

    def spread(self, made: Sequence[Tensor]) -> list[Tensor | None]:
        found = iter(made)
        return [next(found) if is_there else None for is_there in self.is_there]
