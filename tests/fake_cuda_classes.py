"""The C++ halves of torch.cuda's Stream, Event and CUDAGraph, played by fake_cuda.py."""

import warnings
from pathlib import Path
from typing import Any

import torch

from fake_cuda_state import DEVICE, GRAPH_HANDLE, Capture, FakeCuda, cuda_error
from graphfsdp.base.op_tensors import flat_tensors


def stream_base(cuda: FakeCuda) -> type:
    class StreamBase:
        stream_id: int
        device_type = 1
        device_index = 0
        device = DEVICE

        def __new__(cls, priority: int = 0, **kwargs: int) -> Any:
            self: Any = super().__new__(cls)
            if "stream_id" not in kwargs:
                cuda.num_streams += 1
            self.stream_id = kwargs.get("stream_id", cuda.num_streams)
            self.priority = priority
            return self

        @property
        def cuda_stream(self) -> int:
            return GRAPH_HANDLE + 0x100 * self.stream_id if self.stream_id else 0

        def query(self) -> bool:
            cuda.refuse_in_capture("query a stream")
            return True

        def synchronize(self) -> None:
            cuda.refuse_in_capture("wait for a stream")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, StreamBase) and self.stream_id == other.stream_id

        def __hash__(self) -> int:
            return hash(self.stream_id)

    return StreamBase


def event_base(cuda: FakeCuda) -> type:
    class EventBase:
        enable_timing: bool
        cuda_event: int
        at_ms: float | None
        capture: Capture | None
        known: dict[int, int]

        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            self: Any = super().__new__(cls)
            self.enable_timing, self.cuda_event = enable_timing, 0
            self.at_ms = self.capture = None
            self.known = {}
            return self

        def record(self, stream: Any) -> None:
            self.cuda_event = 1
            cuda.now_ms += 1.0
            self.at_ms = cuda.now_ms
            capture = cuda.capture
            joined = capture is not None and stream.stream_id in capture.known
            self.capture = capture if joined else None
            self.known = dict(capture.known[stream.stream_id]) if capture and joined else {}

        def wait(self, stream: Any) -> None:
            capture = cuda.capture
            if not self.cuda_event or capture is None:
                return
            if self.capture is not capture:
                if stream.stream_id in capture.known:
                    capture.is_broken = True
                    raise cuda_error(905)
                return
            known = capture.known.setdefault(stream.stream_id, {})
            for other, count in self.known.items():
                known[other] = max(known.get(other, 0), count)

        def query(self) -> bool:
            cuda.refuse_in_capture("query an event")
            return True

        def synchronize(self) -> None:
            cuda.refuse_in_capture("wait for an event")

        def elapsed_time(self, end: Any) -> float:
            if not (self.enable_timing and end.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            assert self.at_ms is not None
            assert end.at_ms is not None
            return float(end.at_ms - self.at_ms)

    return EventBase


def graph_base(cuda: FakeCuda) -> type:
    class GraphBase:
        keeps: bool
        captured: Capture | None
        generators: list[torch.Generator]

        def __new__(cls, keep_graph: bool = False) -> Any:
            self: Any = super().__new__(cls)
            self.keeps, self.captured, self.generators = keep_graph, None, []
            return self

        def register_generator_state(self, generator: torch.Generator) -> None:
            assert cuda.capture is None, "Cannot register the state during capturing stage."
            self.generators.append(generator)

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "thread_local"
            cuda.log.append("begin capture")
            if pool is None:
                cuda.num_pools += 1
                pool = (cuda.num_pools, 0)
            cuda.begin(self, pool)

        def capture_end(self) -> None:
            cuda.log.append("end capture")
            self.captured = cuda.end()

        def instantiate(self) -> None:
            assert self.captured is not None
            cuda.log.append("instantiate")

        def replay(self) -> None:
            assert self.captured is not None, "replay without a preceding successful capture"
            cuda.log.append("launch")
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                for call in self.captured.calls:
                    again = flat_tensors([call.op(*call.args, **call.kwargs)])
                    if call.results:
                        for old, new in zip(call.results, again, strict=True):
                            old.copy_(new)

        def pool(self) -> tuple[int, int]:
            if self.captured is None:
                raise RuntimeError("Called CUDAGraph::pool() without a successful capture.")
            return self.captured.pool

        def reset(self) -> None:
            cuda.log.append("reset")
            if self.captured is not None:
                cuda.release(0, self.captured.pool)
            self.captured = None

        def raw_cuda_graph(self) -> int:
            if not self.keeps or self.captured is None:
                raise RuntimeError("You cannot access the raw cudaGraph_t instance")
            return GRAPH_HANDLE

        def debug_dump(self, debug_path: str) -> None:
            warnings.warn("DEBUG: calling debug_dump()", stacklevel=2)
            if self.keeps and self.captured is not None:
                Path(debug_path).write_text("digraph dot {}\n")

    return GraphBase
