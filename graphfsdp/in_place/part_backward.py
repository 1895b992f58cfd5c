"""Gradients on their way back through a part: through the kept autograd graph, or a graph of that.

Note [Order of sums]: where a parameter is used several times, autograd adds up what comes of each
use, in the order of arrival, over everything that the backward pass goes through. A part that added
up its own uses first would come to other last bits where there are uses elsewhere as well. So it
hands over each of them, and the engine adds them up as ever.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from graphfsdp._capture.rules.watcher import noting_code
from graphfsdp._capture.trace.backend import Graph, GraphBackend
from graphfsdp._capture.trace.ran import Ran
from graphfsdp.base.torch_internals import functorch_level, is_batched_for_engine
from graphfsdp.in_place.part_recording import NotAPartError, has_own_memory, recorded

_LOG = logging.getLogger("graphfsdp")
_NUM_WARM = 2  # passes of a form through the kept graph, before one is recorded
_MOST_GRAPHS = 4  # forms of gradients


def nodes_behind(results: Sequence[Tensor]) -> Iterator[Node]:
    """Go through the autograd graph of some tensors, without what gathers gradients of leaves."""
    seen: set[Node] = set()
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        for following, _ in node.next_functions:
            if following is not None and not hasattr(following, "variable"):
                waiting.append(following)


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


@dataclass(frozen=True)
class _BackwardGraph:
    """A graph of the backward pass.

    Attributes:
        grads: Where it reads those of results, by the places of these.
        is_there: For which edges it has gradients.
    """

    graph: Graph
    grads: Mapping[int, Tensor]
    is_there: Sequence[bool]

    def run(self, grads: Sequence[Any]) -> Sequence[Tensor | None]:
        for index, static in self.grads.items():
            static.copy_(grads[index])
        return self.spread(self.graph.replay())

    def spread(self, made: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if len(made) == len(self.is_there):
            return made
        found = iter(made)
        return [next(found) if is_there else None for is_there in self.is_there]


class PartBackward:
    """The backward pass of one recording of a part.

    Attributes:
        num_uses: Of each leaf.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: GraphBackend,
        results: Sequence[GradientEdge | None],
        leaves: Sequence[Tensor],
        uses: Sequence[Sequence[tuple[Node, int]]],
        with_stand_ins: Callable[[], AbstractContextManager[None]],
        on_capture: Callable[[], None],
    ) -> None:
        """``uses`` has the nodes of each leaf's, and which of their inputs it is.

        ``with_stand_ins``: has the module's parameters be those of the recording, as what Python
        there is in the kept graph has them.
        """
        self._module = module
        self._backend = backend
        self._results = results
        self._leaves = leaves
        self._with_stand_ins = with_stand_ins
        self._on_capture = on_capture
        self.num_uses = list(map(len, uses))
        self._uses = uses
        self._several = [
            _listen(place, nodes) for place, nodes in enumerate(uses) if len(nodes) > 1
        ]
        self._ran = Ran()
        self._graphs: dict[Any, _BackwardGraph | None] = {}  # by form of the gradients
        self._num_passes: Counter[Any] = Counter()

    def run(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return a gradient for each use of each leaf, of those of the results."""
        if functorch_level() is not None or any(map(_is_batched, grads)):  # many passes at once
            return self._as_recorded(grads)
        # torch computes a backward pass that is begun within torch.autocast under that.
        key = (torch.is_autocast_enabled(self._backend.device.type), *map(_form_of, grads))
        graph = self._graphs.get(key)
        if graph is not None:
            return graph.run(grads)
        comes = any(grad is not None for grad in grads)
        if not comes or key in self._graphs or len(self._graphs) == _MOST_GRAPHS:
            return self._as_recorded(grads)
        self._num_passes[key] += 1
        if self._num_passes[key] > _NUM_WARM:
            return self._record(key, grads)
        with self._ran.noting():
            return self._as_recorded(grads)

    def _as_recorded(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        with self._with_stand_ins():
            return self._through_kept(grads)

    def _through_kept(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [
            (result, grad)
            for result, grad in zip(self._results, grads, strict=True)
            if grad is not None and result is not None
        ]
        if not pairs:
            return [None] * sum(self.num_uses)
        for arrivals in self._several:
            arrivals.begin()
        totals = torch.autograd.grad(
            [result for result, _ in pairs],
            self._leaves,
            [grad for _, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        several = {arrivals.place: arrivals.taken() for arrivals in self._several}
        found: list[Tensor | None] = []
        for place, (total, count) in enumerate(zip(totals, self.num_uses, strict=True)):
            each = several.get(place, [total])
            found += [*each, *[None] * (count - len(each))]
        return found

    def _record(self, key: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        self._graphs[key] = None
        is_there: list[bool] = []

        def refuse_python() -> None:
            # What a hook or a function of autograd does in Python, it does in each iteration.
            if self._ran.by_users():
                raise NotAPartError("Python of others runs in it")

        def iterate() -> list[Tensor]:
            with noting_code(self._ran):
                found = self._through_kept(static)
            is_there[:] = [grad is not None for grad in found]
            return [grad for grad in found if grad is not None]

        try:
            refuse_python()
            self._on_capture()
            static = [None if grad is None else _at_a_fixed_address(grad) for grad in grads]
            held = {index: grad for index, grad in enumerate(static) if grad is not None}
            graph, made, _ = recorded(
                self._module, self._backend, self._ran, iterate, refuse_more=refuse_python
            )
        except NotAPartError as error:
            _LOG.info("the backward pass of a part stays eager: %s", error)
            return self._as_recorded(grads)
        backward = _BackwardGraph(graph, held, is_there)
        self._graphs[key] = backward
        return backward.spread(made)

    def close(self) -> None:
        for graph in self._graphs.values():
            if graph is not None:
                graph.graph.close()
        self._graphs.clear()
        self._results, self._leaves, self._uses = (), (), ()


def _at_a_fixed_address(grad: Tensor) -> Tensor:
    static = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    if not has_own_memory(grad):
        raise NotAPartError("a gradient comes in a form that is not dense")
    return static.copy_(grad)


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and is_batched_for_engine(grad)


def _form_of(grad: Tensor | None) -> Any:
    return None if grad is None else (grad.shape, grad.stride(), grad.dtype)


def _listen(place: int, nodes: Sequence[tuple[Node, int]]) -> Arrivals:
    """Note what comes of each use; see Note [Order of sums]."""
    arrivals = Arrivals(place)
    for node, index in nodes:
        node.register_hook(partial(arrivals.add, index))
    return arrivals
