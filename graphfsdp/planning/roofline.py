"""The least time that a GPU needs for what was counted: a bound, nothing that was measured.

A kernel takes at least as long as its arithmetic at the peak of the data sheet, and as its bytes
through the GPU's memory; it is shorter only where caches spare it some of the bytes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from graphfsdp.training.metrics import peak_tflops

DeviceName = Literal["h100", "h200", "b200"]


class Device(NamedTuple):
    """A GPU; its arithmetic is that of ``name`` in ``training.metrics``."""

    name: str
    memory_rate: float  # bytes/s
    link_rate: float  # bytes/s to other GPUs, in one direction


# Source: NVIDIA's data sheets of H100 and H200 (SXM: 3.35 and 4.8 TB/s; NVLink 900 GB/s in both
# directions together) and of DGX B200 (64 TB/s of eight; NVLink 1.8 TB/s).
DEVICES: Mapping[DeviceName, Device] = MappingProxyType(
    {
        "h100": Device("H100", 3.35e12, 450e9),
        "h200": Device("H200", 4.8e12, 450e9),
        "b200": Device("B200", 8e12, 900e9),
    }
)

# One short kernel after another of 2.9 us each took 3.8 us where the host launched them one by one
# and had nothing else to do, and 3.4 us in a graph.
# Source: Gray, Getting Started with CUDA Graphs, NVIDIA Technical Blog 2019, on a V100.
CALL_S, NODE_S = 3.8e-6, 0.5e-6


class Bound(NamedTuple):
    """Seconds. ``host`` launches what the GPU computes, sends and receives, all at one time."""

    arithmetic: float
    memory: float
    links: float
    host: float

    @property
    def captured(self) -> float:
        """The least of an iteration that the host launches as one graph."""
        return max(self.arithmetic, self.memory, self.links, CALL_S)


def arithmetic_s(flops: float, dtype: torch.dtype, device: Device) -> float:
    peak = peak_tflops(device.name, dtype)
    assert peak is not None
    return flops / (peak * 1e12)
