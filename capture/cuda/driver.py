"""What the CUDA driver tells of the nodes of a graph, also of one that is being captured."""

import ctypes
from array import array

import torch

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
