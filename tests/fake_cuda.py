"""A GPU that is played on the CPU: streams, events, captures, pools and the driver's library.

Torch's own Python (torch/cuda/streams.py, graphs.py, __init__.py) runs above it unchanged; only
what these files take from C++ is played. Tensors stay on the CPU. A capture notes operators and
takes back what they did, since a capture on a GPU runs nothing; a replay runs them again. What
CUDA and torch 2.11 forbid is refused with their words: host reads and unjoined streams in a
capture, events across its border, and after a capture that was broken everything that torch
cannot do then.
"""

import importlib.util
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from fake_cuda_classes import event_base, graph_base, stream_base
from fake_cuda_state import DEVICE, GRAPH_HANDLE, FakeCuda, PlayedMode, cuda_error
from graphfsdp._capture.cuda.graph import CudaGraphBackend
from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.optim import FusedAdam
from graphfsdp.preflight.script import CpuInstead
from zoo_models import WIDTH, Squared


def _module_of(path: str, name: str) -> types.ModuleType:
    """Run a file of torch once more, above what is played."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the played device under torch.cuda until the test ends."""
    if torch.cuda.is_available():
        pytest.skip("plays a GPU, and this machine has one")
    cuda = FakeCuda()
    nvtx_range("")  # remembers for this process that there are no ranges on this machine

    def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
        assert (device_index, device_type) == (0, 1)
        cuda.stream = stream_id

    def pool_handle() -> tuple[int, int]:
        cuda.num_pools += 1
        return (0, cuda.num_pools)

    def exchange(device: int) -> int:
        return -1 if device < 0 else 0

    played: dict[str, Any] = {
        "_CudaStreamBase": stream_base(cuda),
        "_CudaEventBase": event_base(cuda),
        "_CUDAGraph": graph_base(cuda),
        "_graph_pool_handle": pool_handle,
        "_cuda_isCurrentStreamCapturing": lambda: cuda.is_capturing,
        "_cuda_getCurrentStream": lambda device: (cuda.stream, 0, 1),
        "_cuda_setStream": set_stream,
        "_cuda_getDevice": lambda: 0,
        "_cuda_synchronize": lambda: cuda.refuse_in_capture("synchronize"),
        "_cuda_emptyCache": cuda.empty_cache,
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": cuda.end_allocate,
        "_cuda_releasePool": cuda.release,
        "_cuda_memoryStats": lambda device: {
            "reserved_bytes": {"all": {"current": cuda.reserved_bytes}}
        },
    }
    for name, value in played.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    streams = _module_of(torch.cuda.streams.__file__, "torch.cuda.played_streams")
    graphs = _module_of(torch.cuda.graphs.__file__, "torch.cuda.played_graphs")
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
        monkeypatch.setattr(torch.cuda.streams, name, getattr(streams, name))
    for name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(graphs, name))
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    return cuda


@contextmanager
def running(cuda: FakeCuda) -> Iterator[None]:
    """Run the body on the played device: its operators are seen, and ``cuda`` means the CPU."""
    with CpuInstead(), PlayedMode(cuda):
        yield


def use_cuda_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every captured step the CUDA backend, wherever its model lies."""

    def make(name: str, device: torch.device) -> CudaGraphBackend:
        return CudaGraphBackend(DEVICE)

    monkeypatch.setattr("graphfsdp.api.make_backend", make)


@pytest.fixture
def played_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Play a device under torch.cuda."""
    return install(monkeypatch)


@pytest.fixture
def on_played_device(played_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Run the test on it: captured steps get the CUDA backend, tensors stay on the CPU."""
    use_cuda_backend(monkeypatch)
    with running(played_cuda):
        yield played_cuda


def make_step(
    loss_fn: Callable[..., Tensor] | None = None, **options: Any
) -> graphfsdp.CapturedStep:
    torch.manual_seed(0)
    model = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, WIDTH))
    return graphfsdp.capture(
        model, FusedAdam(model.parameters(), lr=0.01), loss_fn=loss_fn, **options
    )


def leaves_a_stream_unjoined(model: nn.Module, x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x * 2).sum()
    loss: Tensor = model(x)
    return loss


def batch(rows: int = 12) -> Tensor:
    return torch.randn(rows, WIDTH)


__all__ = [
    "DEVICE",
    "GRAPH_HANDLE",
    "FakeCuda",
    "batch",
    "cuda_error",
    "install",
    "leaves_a_stream_unjoined",
    "make_step",
    "running",
    "use_cuda_backend",
]
