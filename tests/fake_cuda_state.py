"""What the played GPU of fake_cuda.py remembers: the capture under way, pools, operators."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphfsdp.base.op_tensors import flat_tensors, is_wrapper_subclass, written_tensors

DEVICE = torch.device("cuda", 0)
GRAPH_HANDLE = 0x7F00_0000_1000  # wider than 32 bits, as addresses are
_TEXTS = {
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: (
        "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
    ),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another"),
}
_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"})


def cuda_error(code: int) -> torch.AcceleratorError:
    """Return an error as torch writes it."""
    name, text = _TEXTS[code]
    return torch.AcceleratorError(f"CUDA error: {text}\nSearch for `{name}' in https://docs")


@dataclass
class Call:
    """A captured operator."""

    op: Any
    args: Any
    kwargs: Any
    results: list[Tensor]  # where a replay leaves what the operator makes


@dataclass
class Capture:
    """A capture under way."""

    graph: Any
    main: int
    pool: tuple[int, int]
    calls: list[Call] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    is_broken: bool = False
    made: set[int] = field(default_factory=set)  # storages
    saved: dict[int, tuple[torch.UntypedStorage, Tensor]] = field(default_factory=dict)
    work: dict[int, int] = field(default_factory=dict)  # by stream: its operators
    known: dict[int, dict[int, int]] = field(default_factory=dict)  # by stream: seen of others
    kept: list[Any] = field(default_factory=list)

    def undo(self) -> None:
        """Take back what the operators did; what they made holds no value on a GPU."""
        for storage, contents in self.saved.values():
            _as_bytes(storage).copy_(contents)
        for call in self.calls:
            for result in call.results:
                if result.is_floating_point():
                    result.fill_(float("nan"))


class FakeCuda:
    """The state of the one device.

    Attributes:
        log: What was asked of it, in order.
        pools: Number of graphs by pool.
        under_way: Pools that the allocator believes are captured into.
        stuck: Generators take part in a capture that never ended.
        fail_in_capture: Breaks the next capture at its first operator of this name.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = 0
        self.num_streams = 0
        self.num_pools = 0
        self.now_ms = 0.0
        self.capture: Capture | None = None
        self.pools: dict[tuple[int, int], int] = {}
        self.under_way: list[tuple[int, int]] = []
        self.stuck = False
        self.reserved_bytes = 1 << 20
        self.cached_bytes = 1 << 18
        self.fail_in_capture: str | None = None
        self.nodes: list[str] = []  # of the graph that was captured last

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream takes part in a capture."""
        return self.capture is not None and self.stream in self.capture.known

    def refuse_in_capture(self, what: str) -> None:
        """Break the capture, if there is one: the host may not wait for the device in it."""
        self.log.append(what)
        if self.capture is not None and self.capture.known:
            self.capture.is_broken = True
            raise cuda_error(900)

    def begin(self, graph: Any, pool: tuple[int, int]) -> None:
        """Begin a capture on the current stream."""
        assert self.stream != 0, "CUDA graphs must be captured on a non-default stream."
        assert self.pools.get(pool, 1) > 0, "torch asserts: use_count > 0"
        assert self.capture is None
        self.pools[pool] = self.pools.get(pool, 0) + 1
        self.under_way.append(pool)
        self.capture = Capture(graph, self.stream, pool, known={self.stream: {}})
        self.stuck = True
        with _unseen():
            graph.rng_state = torch.get_rng_state()

    def end(self) -> Capture:
        """End it; a broken one leaves all the traces that torch 2.11 leaves."""
        capture, self.capture = self.capture, None
        assert capture is not None
        with _unseen():
            capture.undo()
            torch.set_rng_state(capture.graph.rng_state)  # a capture draws nothing
        if capture.is_broken:
            raise cuda_error(901)
        seen = capture.known[capture.main]
        if any(seen.get(stream, 0) < count for stream, count in capture.work.items()):
            raise cuda_error(904)
        assert self.stream == capture.main, "Capture must end on the same stream it began on."
        self.end_allocate(0, capture.pool)
        self.stuck = False
        self.reserved_bytes += 1 << 16
        self.nodes = capture.nodes
        return capture

    def end_allocate(self, device: int, pool: tuple[int, int]) -> None:
        """Play torch._C._cuda_endAllocateToPool."""
        assert device == 0
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        """Play torch._C._cuda_releasePool."""
        assert device == 0
        self.pools[pool] -= 1
        assert self.pools[pool] >= 0

    def empty_cache(self) -> None:
        """Play torch._C._cuda_emptyCache."""
        if self.under_way:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.reserved_bytes -= self.cached_bytes
        self.cached_bytes = 0
        for pool in [pool for pool, count in self.pools.items() if count == 0]:
            self.pools[pool] = -1  # some tensor still lies in it

    def on_op(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and note it if it is captured."""
        draws = torch.Tag.nondeterministic_seeded in op.tags
        capture = self.capture
        if capture is None or self.stream not in capture.known:
            if draws and self.stuck:
                raise RuntimeError(
                    "Offset increment outside graph capture encountered unexpectedly."
                )
            return op(*args, **kwargs)
        name = op._schema.name
        if name in _HOST_READS or name == self.fail_in_capture:
            self.fail_in_capture = None
            capture.is_broken = True
            raise cuda_error(900)
        given = flat_tensors(args) + flat_tensors(kwargs.values())
        written = given if op.namespace == "c10d" else written_tensors(op, args, kwargs)
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in capture.made and storage._cdata not in capture.saved:
                with _unseen():
                    capture.saved[storage._cdata] = (storage, _as_bytes(storage).clone())
        result = op(*args, **kwargs)
        before = {tensor.untyped_storage()._cdata for tensor in given}
        results = [t for t in flat_tensors([result]) if t.untyped_storage()._cdata not in before]
        capture.made |= {tensor.untyped_storage()._cdata for tensor in results}
        held = _alias(args), {key: _alias(value) for key, value in kwargs.items()}
        capture.calls.append(Call(op, *held, [tensor.detach() for tensor in results]))
        if results or written:
            capture.work[self.stream] = capture.work.get(self.stream, 0) + 1
            capture.known[self.stream][self.stream] = capture.work[self.stream]
            capture.nodes += _nodes_of(name)
        return result


class PlayedMode(TorchDispatchMode):
    """Lies below all others."""

    supports_higher_order_operators = True

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        if any(is_wrapper_subclass(kind) for kind in types):
            return NotImplemented
        return self._cuda.on_op(func, args, kwargs or {})


@contextmanager
def _unseen() -> Iterator[None]:
    """What C++ does by itself is seen by no mode and no profile hook."""
    hook = sys.getprofile()
    sys.setprofile(None)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield
    finally:
        sys.setprofile(hook)


def _nodes_of(name: str) -> list[str]:
    short = name.partition("::")[2]
    if short.startswith(("empty", "detach", "lift")):
        return []
    kinds = {"copy_": "memcpy", "zero_": "memset", "zeros": "memset"}
    return [kinds.get(short, f"kernel {short}")]


def _alias(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(_alias(item) for item in value)
    return value


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
