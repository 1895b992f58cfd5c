"""Gradients on their way back through a part: through the kept autograd graph, or a graph of that.

Note [Order of sums]: where a parameter is used several times, autograd adds up what comes of each
use, in the order of arrival, over everything that the backward pass goes through. A part that added
up its own uses first would come to other last bits where there are uses elsewhere as well. So it
hands over each of them, and the engine adds them up as ever.
"""

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from graphfsdp._capture.rules.watcher import noting_code
from graphfsdp._capture.trace.backend import Graph, GraphBackend
from graphfsdp._capture.trace.source import Ran
from graphfsdp.base.torch_internals import functorch_level, is_batched_for_engine
from graphfsdp.in_place.part_recording import NotAPartError, has_own_memory, recorded

_LOG = logging.getLogger("graphfsdp")
_NUM_WARM = 2  # passes of a form through the kept graph, before one is recorded
_MOST_GRAPHS = 4  # forms of gradients
_Replay = Callable[[Sequence[Any]], Sequence[Tensor | None]]


def nodes_behind(results: Sequence[Tensor], cuts: Container[object] = ()) -> Iterator[Node]:
    """Go through the autograd graph of some tensors, without what gathers gradients of leaves.

    ``cuts``: edges (a node, and which output of it) over which it does not go on.
    """
    seen: set[Node] = set()
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        for edge in node.next_functions:
            following, _ = edge
            if following is None or edge in cuts or hasattr(following, "variable"):
                continue
            waiting.append(following)


class PartBackward:
    """The backward pass of one recording of a part."""

    def __init__(
        self,
        module: nn.Module,
        backend: GraphBackend,
        results: Sequence[GradientEdge | None],
        leaves: Sequence[Any],  # Tensors, and GradientEdges of results that others are made of
        uses: Sequence[Sequence[tuple[Node, int]]],
        with_stand_ins: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``uses`` has the nodes of each leaf's, last ones first, and which of their inputs it is.

        ``with_stand_ins``: has the module's parameters be those of the recording, as what Python
        there is in the kept graph has them.
        """
        self._module = module
        self._backend = backend
        self._results = results
        self._leaves = leaves
        self._with_stand_ins = with_stand_ins
        self._num_uses = list(map(len, uses))
        # What has come of a use, where a leaf has several; see Note [Order of sums].
        self._arrived: dict[tuple[int, int], Tensor | None] = {}
        for leaf, nodes in enumerate(uses):
            for use, (node, index) in enumerate(nodes if len(nodes) > 1 else ()):
                node.register_hook(partial(_note, self._arrived, (leaf, use), index))
        self._ran = Ran()
        # By form of the gradients; None where no graph holds it.
        self.graphs: dict[Any, _Replay | None] = {}
        self._recorded: list[Graph] = []
        self._num_passes: Counter[Any] = Counter()

    def run(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return a gradient for each use of each leaf, of those of the results."""
        if all(grad is None for grad in grads):
            return [None] * sum(self._num_uses)
        if functorch_level() is not None or any(map(_is_batched, grads)):  # many passes at once
            return self._as_recorded(grads)
        # torch computes a backward pass that is begun within torch.autocast under that.
        key = (torch.is_autocast_enabled(self._backend.device.type), *map(_form_of, grads))
        graph = self.graphs.get(key)
        if graph is not None:
            return graph(grads)
        if key in self.graphs or len(self.graphs) == _MOST_GRAPHS:
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
        self._arrived.clear()  # of a pass that has failed
        totals = torch.autograd.grad(
            [result for result, _ in pairs],
            self._leaves,
            [grad for _, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        found: list[Tensor | None] = []
        for leaf, (total, count) in enumerate(zip(totals, self._num_uses, strict=True)):
            if count == 1:
                found.append(total)
            else:
                found += [self._arrived.pop((leaf, use), None) for use in range(count)]
        return found

    def _record(self, key: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        self.graphs[key] = None
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
            static = [None if grad is None else _at_a_fixed_address(grad) for grad in grads]
            held = {index: grad for index, grad in enumerate(static) if grad is not None}
            graph, made, _ = recorded(
                self._module, self._backend, self._ran, iterate, refuse_more=refuse_python
            )
        except NotAPartError as error:
            _LOG.info("the backward pass of a part stays eager: %s", error)
            return self._as_recorded(grads)
        self._recorded.append(graph)

        def spread(made: Sequence[Tensor]) -> Sequence[Tensor | None]:
            if all(is_there):
                return made
            found = iter(made)
            return [next(found) if there else None for there in is_there]

        def replay(grads: Sequence[Any]) -> Sequence[Tensor | None]:
            for index, target in held.items():
                target.copy_(grads[index])
            return spread(graph.replay())

        self.graphs[key] = replay
        return spread(made)

    def close(self) -> None:
        for graph in self._recorded:
            graph.close()
        self.graphs.clear()
        self._results, self._leaves = (), ()


def _at_a_fixed_address(grad: Tensor) -> Tensor:
    static = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    if not has_own_memory(grad):
        raise NotAPartError("a gradient comes in a form that is not dense")
    return static.copy_(grad)


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and is_batched_for_engine(grad)


def _form_of(grad: Tensor | None) -> Any:
    return None if grad is None else (grad.shape, grad.stride(), grad.dtype)


def _note(
    arrived: dict[tuple[int, int], Tensor | None],
    use: tuple[int, int],
    index: int,
    grad_inputs: Sequence[Tensor | None],
    _: object,
) -> None:
    arrived[use] = grad_inputs[index]
