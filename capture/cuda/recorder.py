"""Which operator of a capture made which nodes of the CUDA graph, of which the driver tells."""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.program_facts import Description, ProgramFacts, Role
from graphfsdp._capture.trace.values import Node, Value, geometry_of
from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.errors import CaptureError

_LIBRARY = "libcuda.so.1"
# CUgraphNodeType, in its order.
_TYPES = (
    *("kernel", "memcpy", "memset", "host", "graph", "empty", "wait event", "record event"),
    *("signal semaphore", "wait for semaphore", "allocate", "free", "batch of memory operations"),
    "conditional",
)
_KERNEL = 0
_NON_BLOCKING = 1  # CUstream_flags
_ACTIVE = 1  # CUstreamCaptureStatus
# Forms of one call, and how many more places for answers each has; CUDA 13 has the second.
_CAPTURE_INFO = (("cuStreamGetCaptureInfo_v2", 2), ("cuStreamGetCaptureInfo_v3", 3))
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


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class CudaDriver:
    """Looks at graphs by their handles; every answer is None or short where it is too old.

    CUDA rule: while a stream is captured, everything but removing nodes may be asked of its graph.
    """

    def __init__(self) -> None:
        """OSError if there is no driver library."""
        self._cuda = ctypes.CDLL(_LIBRARY)

    def capturing_graph(self, stream: int) -> int | None:
        """Return the handle of the graph that a stream is captured into, None if it is not."""
        # Nothing is asked about dependencies: edges of kernels that begin before others are over
        # (cuBLAS on Hopper) make the older form fail where it is.
        status, graph = ctypes.c_int(0), ctypes.c_void_p()
        wanted = (ctypes.byref(status), None, ctypes.byref(graph))
        for name, num_others in _CAPTURE_INFO:
            ask = getattr(self._cuda, name, None)
            if ask is not None and ask(ctypes.c_void_p(stream), *wanted, *[None] * num_others) == 0:
                return graph.value if status.value == _ACTIVE else None
        return None

    def count(self, graph: int) -> int | None:
        """Return the number of a graph's nodes, None where the driver does not tell."""
        count = ctypes.c_size_t(0)
        code = self._cuda.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
        return int(count.value) if code == 0 else None

    def nodes(self, graph: int) -> "array[int] | None":
        """Return the handles of a graph's nodes, in any order; takes as long as there are many."""
        known = self.count(graph)
        if not known:
            return None if known is None else array("Q")
        found, count = (ctypes.c_uint64 * known)(), ctypes.c_size_t(known)
        if self._cuda.cuGraphGetNodes(ctypes.c_void_p(graph), found, ctypes.byref(count)) != 0:
            return None
        listed = array("Q")
        listed.frombytes(bytes(found))  # array("Q", found) would make a Python number of each
        return listed

    def name(self, node: int) -> str:
        """Return the type of a node, and for a kernel its name behind that."""
        kind = ctypes.c_int(-1)
        code = self._cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        if code != 0 or not 0 <= kind.value < len(_TYPES):
            return "unknown"
        name = self._kernel_name(node) if kind.value == _KERNEL else ""
        return f"{_TYPES[kind.value]} {name}".rstrip()

    def new_stream(self) -> int | None:
        """Return the handle of a new stream of the current device, which nobody else is given."""
        # One that the legacy stream does not wait for, as torch's are.
        stream = ctypes.c_void_p()
        code = self._cuda.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream.value if code == 0 else None

    def order(self, graph: int, earlier: int, later: int) -> bool:
        """Let one node of a graph wait for another one; return whether it does."""
        before = self._dependencies(later)
        if before is None:
            return False
        if earlier in before:  # once more would be an error
            return True
        nodes = (ctypes.byref(ctypes.c_void_p(earlier)), ctypes.byref(ctypes.c_void_p(later)))
        code = self._cuda.cuGraphAddDependencies_v2(
            ctypes.c_void_p(graph), *nodes, None, ctypes.c_size_t(1)
        )
        return bool(code == 0)

    def _dependencies(self, node: int) -> list[int] | None:
        # Forms since CUDA 12.3, as those of names: the older ones fail where an edge has data.
        get, count = getattr(self._cuda, "cuGraphNodeGetDependencies_v2", None), ctypes.c_size_t(0)
        if get is None or get(ctypes.c_void_p(node), None, None, ctypes.byref(count)) != 0:
            return None
        found, data = (ctypes.c_uint64 * count.value)(), (ctypes.c_uint64 * count.value)()
        if count.value and get(ctypes.c_void_p(node), found, data, ctypes.byref(count)) != 0:
            return None
        return list(found)

    def _kernel_name(self, node: int) -> str:
        params, name = _KernelParams(), ctypes.c_char_p()
        try:
            get = self._cuda.cuGraphKernelNodeGetParams_v2
            if get(ctypes.c_void_p(node), ctypes.byref(params)) != 0:
                return ""
            asks = (
                (self._cuda.cuFuncGetName, params.func),
                (self._cuda.cuKernelGetName, params.kern),
            )
        except AttributeError:  # a driver before CUDA 12.3
            return ""
        for ask, handle in asks:
            if handle and ask(ctypes.byref(name), ctypes.c_void_p(handle)) == 0 and name.value:
                return str(torch._C._demangle(name.value.decode()))
        return ""


def find_driver() -> CudaDriver | None:
    try:
        return CudaDriver()
    except OSError:
        return None


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
    Where only a function is compiled, a capture with a watcher comes to it first and is given up;
    what it has moved in Python is put back before the next one.
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
