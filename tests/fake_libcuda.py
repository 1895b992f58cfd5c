"""The CUDA driver's library for ctypes, played: it answers for the graph of fake_cuda.py."""

import ctypes
from collections.abc import Callable
from typing import Any

from fake_cuda_state import GRAPH_HANDLE, FakeCuda

_NODE_HANDLE = 0x7F00_0001_0000


class FakeLibcuda:
    """libcuda.so.1 for ctypes: C functions with the types of cuda.h, answered in Python."""

    def __init__(self, cuda: FakeCuda, without: tuple[str, ...] = ()) -> None:
        self._cuda = cuda
        self._names = [ctypes.create_string_buffer(b"_Z6kerneli")]
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        to = ctypes.POINTER
        types_of: dict[str, tuple[Any, ...]] = {
            "cuStreamGetCaptureInfo_v2": (
                *(pointer, to(number), to(ctypes.c_uint64), to(pointer)),
                *(to(pointer), to(size)),
            ),
            "cuStreamGetCaptureInfo_v3": (
                *(pointer, to(number), to(ctypes.c_uint64), to(pointer)),
                *(to(pointer), to(pointer), to(size)),
            ),
            "cuGraphGetNodes": (pointer, to(pointer), to(size)),
            "cuGraphNodeGetType": (pointer, to(number)),
            "cuGraphKernelNodeGetParams_v2": (pointer, pointer),
            "cuFuncGetName": (to(ctypes.c_char_p), pointer),
            "cuKernelGetName": (to(ctypes.c_char_p), pointer),
        }
        for name, arguments in types_of.items():
            if name not in without:
                answer: Callable[..., int] = getattr(self, f"_{name}")
                setattr(self, name, ctypes.CFUNCTYPE(number, *arguments)(answer))

    def _current(self) -> list[str]:
        return self._cuda.nodes if self._cuda.capture is None else self._cuda.capture.nodes

    def _cuStreamGetCaptureInfo_v2(  # noqa: N802
        self, stream: int, status: Any, number: Any, graph: Any, dependencies: Any, count: Any
    ) -> int:
        return self._capture_info(stream, status, graph)

    def _cuStreamGetCaptureInfo_v3(  # noqa: N802
        self, stream: int, status: Any, number: Any, graph: Any, nodes: Any, edges: Any, count: Any
    ) -> int:
        assert bool(edges) <= bool(nodes)
        return self._capture_info(stream, status, graph)

    def _capture_info(self, stream: int, status: Any, graph: Any) -> int:
        capture = self._cuda.capture
        streams = () if capture is None else capture.known
        captured = stream in {GRAPH_HANDLE + 0x100 * number for number in streams}
        status[0] = int(captured)
        if captured:
            graph[0] = GRAPH_HANDLE
        return 0

    def _cuGraphGetNodes(self, graph: int, nodes: Any, count: Any) -> int:  # noqa: N802
        assert graph == GRAPH_HANDLE
        if nodes:
            for index in range(count[0]):
                nodes[index] = _NODE_HANDLE + 8 * index
        else:
            count[0] = len(self._current())
        return 0

    def _kind(self, node: int) -> str:
        return self._current()[(node - _NODE_HANDLE) // 8]

    def _cuGraphNodeGetType(self, node: int, kind: Any) -> int:  # noqa: N802
        kind[0] = ("kernel", "memcpy", "memset").index(self._kind(node).partition(" ")[0])
        return 0

    def _cuGraphKernelNodeGetParams_v2(self, node: int, params: int) -> int:  # noqa: N802
        name = ctypes.create_string_buffer(self._kind(node).partition(" ")[2].encode())
        self._names.append(name)
        ctypes.c_void_p.from_address(params).value = ctypes.addressof(name)  # the first field
        return 0

    def _cuFuncGetName(self, name: Any, function: int) -> int:  # noqa: N802
        name[0] = ctypes.string_at(function)
        return 0

    def _cuKernelGetName(self, name: Any, kernel: int) -> int:  # noqa: N802
        return 1
