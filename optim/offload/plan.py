"""Which parameters' optimizer state is offloaded to the CPU, and in which parts it is stepped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part
from graphfsdp.optim.fused.scaled_moments import has_scales, scale_shape
from graphfsdp.optim.fused.step_settings import StepSettings
from graphfsdp.optim.fused.step_state import BORDER_NUMEL, continues


class Owned(NamedTuple):
    """A parameter and its place.

    Attributes:
        param: The parameter; maybe a DTensor.
        row: Its group.
        name: For messages.
    """

    param: Tensor
    row: int
    name: str


@dataclass(frozen=True)
class OffloadOptions:
    """How state is kept in the CPU's memory; see ``CPUOffload``."""

    offload_fraction: float = 1.0
    pin_cpu_params: bool = False
    pin_cpu_grads: bool = False
    overlap: bool = True
    bucket_bytes: int = 64 * 2**20


def choose_offloaded(numels: Sequence[int], fraction: float) -> list[bool]:
    """Return which parameters are offloaded: from the first on, until the fraction is reached.

    Source: Megatron-LM, ``HybridDeviceOptimizer``.
    """
    wanted, so_far = fraction * sum(numels), 0
    chosen = []
    for numel in numels:
        chosen.append(so_far < wanted)
        so_far += numel if chosen[-1] else 0
    return chosen


def buckets(owned: Sequence[Owned], bucket_bytes: int) -> Iterator[list[Owned]]:
    """Yield neighbours of one dtype, together at least so many bytes but for the last.

    A flat run is cut only where vectorised kernels round alike on both sides.
    """
    bucket: list[Owned] = []
    nbytes = run_numel = 0
    previous: Tensor | None = None
    for item in owned:
        local = local_part(item.param.detach())
        if previous is None or not continues(previous, local):
            run_numel = 0
        full = nbytes >= bucket_bytes and run_numel % BORDER_NUMEL == 0
        if previous is not None and (full or local.dtype != previous.dtype):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(item)
        nbytes += local.nbytes
        run_numel += local.numel()
        previous = local
    if bucket:
        yield bucket


def state_bytes(param: Tensor, settings: StepSettings) -> int:
    """Return the bytes of state of this rank's rows of a parameter, without the step count."""
    local = local_part(param)
    num_bytes = 0
    for dtype in settings.state_dtypes(param).values():
        num_bytes += local.numel() * dtype.itemsize
        if has_scales(dtype):
            rows, blocks = scale_shape(local.shape)
            num_bytes += rows * blocks * torch.float32.itemsize
    return num_bytes
