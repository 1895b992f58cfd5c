"""The least time that a GPU needs for what was counted: a bound, nothing that was measured.

A kernel takes at least as long as its arithmetic at the peak of the data sheet, and as its bytes
through the GPU's memory; it is shorter only where caches spare it some of the bytes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch

from graphfsdp.training.metrics import GPUS, Gpu, peak_tflops

DeviceName = Literal["h100", "h200", "b200"]
DEVICES: Mapping[DeviceName, Gpu] = MappingProxyType(
    {name: gpu for name in get_args(DeviceName) for gpu in GPUS if gpu.name == name.upper()}
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


def arithmetic_s(flops: float, dtype: torch.dtype, device: Gpu) -> float:
    peak = peak_tflops(device.name, dtype)
    assert peak is not None
    return flops / (peak * 1e12)
