"""What was recorded for one kind of batch, and the few of them that a step keeps."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.gradients import Landed
from graphfsdp._capture.guards.guards import Guards
from graphfsdp._capture.guards.moves import Kept
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.rules.constants import ConstantLog, ConstantWatch
from graphfsdp._capture.trace.backend import Graph
from graphfsdp.base.dtensors import Wrapping
from graphfsdp.base.streams import YOUNG, without_collector
from graphfsdp.base.torch_internals import TreeSpec, tree_flatten, tree_unflatten
from graphfsdp.config import OnChange
from graphfsdp.errors import BatchMismatchError, split_remedy

_LOG = logging.getLogger("graphfsdp")


class Results:
    """The form of an iteration's output: a graph knows a flat list of plain tensors."""

    def __init__(self, inputs: StaticInputs) -> None:
        """Take it of an iteration over ``inputs`` that is over: see ``flatten``."""
        self._inputs = inputs
        self._written = inputs.take_writes()  # numbers of leaves
        self._spec: TreeSpec | None = None
        # By leaf of the output, how many tensors are in it; those that are none are None.
        self._parts: list[tuple[Wrapping | None, int]] = []
        self._is_single = False

    def flatten(self, output: Any) -> list[Tensor]:
        """Remember the form of an output, and return its tensors.

        They are followed by copies of what the iteration has written into its batch.
        """
        if self._written:
            output = output, self._inputs.copies_of(self._written)
        leaves, self._spec = tree_flatten(output)
        tensors: list[Tensor] = []
        for leaf in leaves:
            wrapping, inside = Wrapping.take_apart(leaf) if isinstance(leaf, Tensor) else (None, [])
            self._parts.append((wrapping, len(inside)))
            tensors.extend(inside)
        # The usual one: a loss alone.
        self._is_single = isinstance(output, Tensor) and self._parts == [(None, 1)]
        return tensors

    def unflatten(self, results: Sequence[Tensor]) -> tuple[Any, Tensor | None]:
        """Return the output that these tensors make, and the one that follows them, if any.

        What the iteration has written into its batch is written into the caller's, once.
        """
        assert self._spec is not None
        given, self._inputs.given = self._inputs.given, None
        if self._is_single:
            return results[0], results[1] if len(results) > 1 else None
        tensors = iter(results)
        leaves: list[Tensor | None] = []
        for wrapping, count in self._parts:
            inside = list(itertools.islice(tensors, count))
            whole = inside[0] if inside else None
            leaves.append(whole if wrapping is None else wrapping.around(inside))
        output = tree_unflatten(leaves, self._spec)
        if self._written:
            output, copies = output
            with torch.no_grad():
                for index, copy in zip(self._written, copies, strict=True):
                    if given is not None:
                        given[index].copy_(copy)
        return output, next(tensors, None)


@dataclass(eq=False)
class Recording:
    """One kind of batch: its static inputs, and its graph once there is one.

    Attributes:
        inputs: Where such batches are copied to.
        trains: Whole iterations are recorded; else forward passes alone.
        num_eager: Warm-ups with such batches.
        results: The form of what the last iteration that was run as Python has returned.
        num_verified: Replays that were compared with an eager run.
        num_replays: Calls since the capture, and ``num_audited`` of them at the last audit.
        num_hooks: Of gradients, when the graph was made.
        log: What the recorded iteration has done; None if nobody could see.
        guards: What must be as it was when the graph was made; None before that.
        constants: Compares the last warm-up with the capture; None before the last warm-up.
        orders: In which units of sharded models gather in it.
        has_waited: Its warm-up has begun anew once, for other values than before.
        kept: What the recorded iteration has left in Python; a replay writes into these tensors.
    """

    inputs: StaticInputs
    trains: bool = True
    num_eager: int = 0
    num_verified: int = 0
    num_replays: int = 0
    num_audited: int = 0
    num_hooks: int = 0
    results: Results = field(init=False)
    log: ConstantLog | None = None
    graph: Graph | None = None
    guards: Guards | None = None
    constants: ConstantWatch | None = None
    has_waited: bool = False
    orders: list[Any] = field(default_factory=list)
    landed: Landed = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def wait_once(self) -> bool:
        """Begin warm-up anew, after other values than before; return False the second time.

        Whoever changes something between two calls does so once, a counter always.
        """
        if self.has_waited:
            return False
        self.has_waited, self.num_eager = True, 0
        return True

    @contextmanager
    def noting(self, make: Callable[[], ConstantWatch]) -> Iterator[None]:
        """Note the values of the warm-up in the body, for the capture that may be next."""
        self.constants = self.constants or make()
        is_first = not self.num_eager and not self.has_waited
        with without_collector(YOUNG), self.constants.noting(is_first=is_first):
            yield

    def begin(self, num_hooks: int) -> None:
        """Keep what the capture has done for audits, and let go of what compared it."""
        if self.constants is not None:
            self.log = self.constants.log
        self.num_replays = self.num_audited = 0
        self.num_hooks, self.constants = num_hooks, None

    def drop_graph(self) -> None:
        """Give the graph back; another attempt may follow, and is compared as well."""
        graph, self.graph = self.graph, None
        self.guards, self.landed, self.kept, self.log = None, [], [], None
        if graph is not None:
            graph.close()

    def close(self) -> None:
        self.drop_graph()
        self.constants = None


class Recordings(list[Recording]):
    """The recordings of a step, the least recently used first, which is the first to go."""

    def __init__(
        self, max_graphs: int, device: torch.device, on_change: OnChange, *, trains: bool = True
    ) -> None:
        super().__init__()
        self._max_graphs = max_graphs
        self._device = device
        self._on_change = on_change
        self._trains = trains

    @property
    def latest(self) -> Recording | None:
        return self[-1] if self else None

    @property
    def num_graphs(self) -> int:
        return sum(entry.graph is not None for entry in self)

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> Recording:
        """Return the recording of a batch's kind, whose inputs can load it.

        A kind that is new gets one; it is kept only if a graph may follow.
        """
        for index in range(len(self) - 1, -1, -1):
            if self[index].inputs.accept(args, kwargs, num_microbatches):
                self.append(self.pop(index))
                return self[-1]
        known = self.latest
        keeps = known is None or self._on_change is OnChange.RECAPTURE
        if known is not None:
            why = known.inputs.difference(args, kwargs, num_microbatches)
            if self._on_change is OnChange.RAISE:
                raise BatchMismatchError(why)
            what = "another graph will be made" if keeps else "running eagerly"
            _LOG.info("%s: %s", what, split_remedy(why)[0])
        inputs = StaticInputs(args, kwargs, device=self._device, num_microbatches=num_microbatches)
        entry = Recording(inputs, trains=self._trains)
        if keeps:
            self.append(entry)
            self._drop_oldest()
        return entry

    def _drop_oldest(self) -> None:
        if len(self) <= self._max_graphs:
            return
        self.pop(0).close()
        _LOG.info(
            "the graph that was not used for longest is given up: there are more than "
            "max_graphs=%d kinds of batches",
            self._max_graphs,
        )

    def give_up(self, entry: Recording) -> None:
        if entry in self:
            self.remove(entry)
        entry.close()

    def close(self) -> None:
        while self:
            self.pop().close()
