"""Writes down which operator of a capture made which nodes of the CUDA graph."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.cuda.driver import CudaDriver
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.program_facts import Description, ProgramFacts, Role
from graphfsdp._capture.trace.values import Node, Value, geometry_of
from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.errors import CaptureError

_FOREIGN = "_c10d_functional"  # namespace of collectives that are not ours
_COLLECTIVE = "kernel nccl"
_UNORDERED = (
    "the graph's collectives cannot be put in one order, without which ranks may wait for each "
    "other in different ones: this driver does not tell the names of kernels, or takes no more "
    "dependencies. Remedy: a driver of CUDA 12.3 or newer (R545), or scope='none'"
)


# Up to so many nodes are listed after each operator, more of them when there are so many times as
# many as when they were listed last.
_NUM_EXACT, _GROWTH = 256, 1.25


class CudaRecorder(Watcher):
    """A watcher that looks for new nodes of the graph after each operator.

    Note [Kernels by operator]: a capture only adds nodes. So those that are new after an operator
    are the operator's, on whichever of the capture's streams it ran. How many they are the driver
    tells at once, and so that is asked after each operator; but it only ever lists all of them,
    which after each operator would make a capture quadratic in its nodes. The documentation says
    nothing of the order of such a list. If each of the first lists has begun with the one before
    it, the driver appends, and so the others are made for ever larger blocks; if one has not, nodes
    are listed after each operator to the end.

    Note [One order of collectives]: branches of a graph have no order, and each rank's GPU chooses
    by itself. Collectives of two communicators (tensor parallelism beside sharding, say) that do
    not wait for each other may then deadlock, each GPU being taken by another one. So when all is
    captured, each collective, which is known by its kernel's name, is made to wait for the one that
    was issued before it, whoever has issued it on whatever stream. That adds no cycle, as a node
    only waits for what was captured before it, and no operator has to know of it.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        driver: CudaDriver | None,
    ) -> None:
        """Without a ``driver``, operators are noted without kernels."""
        super().__init__(model, device)
        self._driver = driver
        self._nodes: list[Node] = []
        self._listed = array("Q")  # nodes, as the driver has listed them last
        self._found: list[int] = []  # nodes in the order of the operators
        self._num_found: list[int] = []  # after each operator
        self._appends = True
        self._graph: int | None = None
        self._exchange: str | None = None  # the first collective that is not ours

    def on_op(self, call: OpCall) -> Any:
        node = Node.of(call, self._value_of, self.site)
        result = call.run()
        if call.op.namespace == _FOREIGN:
            self._exchange = self._exchange or call.name
        node.outputs += map(self._value_of, flat_tensors([result]))
        self._nodes.append(node)
        self._num_found.append(self._count_nodes())
        return result

    def describe(self, outputs: Sequence[Tensor], graph: int) -> ProgramFacts:
        """``graph`` is the handle of the finished graph."""
        names = self.finish(graph)
        ends = [0, *accumulate(self._num_found, max), len(names)]
        results = (self.storages.find(tensor, "output") for tensor in outputs)
        return Description(
            [(node, True) for node in self._nodes],
            self.sites.sites(),
            {id(info): info.get().data_ptr() for info in self.storages if info.external},
            outlives=[(id(info), Role.OUTPUT, None) for info in results],
            kernels=[tuple(names[start:end]) for start, end in pairwise(ends)],
        )()

    def finish(self, graph: int) -> list[str]:
        """Put the collectives of a captured graph in order; return the names of its nodes.

        See Note [One order of collectives].
        """
        driver = self._driver
        nodes = None if driver is None else driver.nodes(graph)
        if nodes:
            self._add(nodes)
        names = [] if driver is None else [driver.name(node) for node in self._found]
        meeting = [
            node
            for node, name in zip(self._found, names, strict=True)
            if name.startswith(_COLLECTIVE)
        ]
        is_blind = self._exchange is not None and not any(
            name.startswith("kernel ") for name in names
        )
        if is_blind or not all(
            driver is not None and driver.order(graph, *pair) for pair in pairwise(meeting)
        ):
            raise CaptureError(_UNORDERED, op=self._exchange)
        return names

    def _count_nodes(self) -> int:
        """Return how many nodes there are; list them now and then."""
        if self._driver is None:
            return 0
        if self._graph is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._graph = self._driver.capturing_graph(stream)
        num_nodes = None if self._graph is None else self._driver.count(self._graph)
        num_listed = len(self._listed)
        if self._graph is None or num_nodes is None or num_nodes == num_listed:
            return num_listed
        is_due = num_nodes >= _GROWTH * num_listed or num_nodes <= _NUM_EXACT
        if is_due or not self._appends:
            self._add(self._driver.nodes(self._graph) or array("Q"))
        return num_nodes

    def _add(self, nodes: "array[int]") -> None:
        """Take the nodes of the graph that are new in such a list."""
        num_known = len(self._listed)
        if nodes[:num_known].tobytes() == self._listed.tobytes():
            self._found += nodes[num_known:]
        else:
            self._appends = False
            known = set(self._found)
            self._found += [node for node in nodes if node not in known]
        self._listed = nodes

    def _value_of(self, tensor: Tensor) -> Value:
        # What was not seen before, the operator has made.
        info = self.storages.known(tensor, self.last_op or "", external=False, varies=False)
        return Value(info, geometry_of(tensor), None)


class UnwatchedRecorder(CudaRecorder):
    """Takes the place of a watcher where compiled code runs, and sees nothing.

    Note [Compiled regions]: while a dispatch mode or a function mode is on, torch.compile runs a
    region uncompiled or compiles it anew, in the middle of the capture. So an iteration with
    compiled regions is captured without a watcher: the driver alone says what a graph cannot hold.
    """

    @contextmanager
    def watching(self) -> Iterator[None]:
        yield

    def has_touched(self, tensor: Tensor) -> bool:
        return True

    def follow_streams(self) -> None: ...

    def describe(self, outputs: Sequence[Tensor], graph: int) -> ProgramFacts:
        self.finish(graph)
        return ProgramFacts((), (), 0)
