"""Copies between a device and the CPU's memory: packed buffers, and streams of their own.

Shapes: [...] any shape.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.host_memory import zeros_flat
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.flat_runs import is_dense
from graphfsdp.optim.fused.step_state import BORDER_NUMEL, continues

_HOST = torch.device("cpu")


def pack(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None, *, pinned: bool
) -> list[Tensor]:
    """Return new tensors on the CPU, in one buffer for each dtype.

    Those that are neighbours in memory have neighbours, and others have not: vectorised kernels
    round the last elements of a run otherwise, and runs are to be the same on the CPU.

    Args:
        tensors: Give shapes and strides, and the dtype where ``dtypes`` is None.
        dtypes: Of each.
        pinned: In page-locked memory.
    """
    wanted = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(wanted):
        members = [index for index, own in enumerate(wanted) if own == dtype]
        offsets, end = [], 0
        for before, index in zip([None, *members], members, strict=False):
            if before is None or not continues(tensors[before], tensors[index]):
                end = -(-end // BORDER_NUMEL) * BORDER_NUMEL
            offsets.append(end)
            end += tensors[index].numel()
        buffer = _allocate(end, dtype, pinned=pinned)
        for index, offset in zip(members, offsets, strict=True):
            found[index] = _view(buffer, tensors[index], offset)
    return [found[index] for index in range(len(tensors))]


def _view(buffer: Tensor, like: Tensor, offset: int) -> Tensor:
    if is_dense(like.shape, like.stride()):
        return buffer.as_strided(like.shape, like.stride(), offset)
    return buffer.narrow(0, offset, like.numel()).view(like.shape)


def _allocate(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    if not pinned:
        return zeros_flat(numel, dtype, _HOST)
    try:
        return torch.empty(numel, dtype=dtype, device=_HOST, pin_memory=True)
    except RuntimeError as error:
        raise ConfigError(
            f"{numel * dtype.itemsize} bytes of page-locked memory cannot be had ({error}). "
            "Remedy: pin_cpu_params=False and pin_cpu_grads=False, or a higher limit (ulimit -l)"
        ) from error


class SideCopies:
    """The side streams of the copies; on a CPU, and without overlap, all is done in order."""

    def __init__(self, device: torch.device | None, *, overlap: bool) -> None:
        on_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._device = device if on_gpu else None
        streams = self._device is not None and overlap
        self._down = torch.cuda.Stream(self._device) if streams else None
        self._up = torch.cuda.Stream(self._device) if streams else None

    def fork(self) -> None:
        """Let copies begin after what has been enqueued so far."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def downwards(self) -> Any:
        """Return a context in which copies to the CPU are enqueued."""
        return nullcontext() if self._down is None else torch.cuda.stream(self._down)

    def upwards(self) -> Any:
        """Return a context in which copies to the device are enqueued."""
        return nullcontext() if self._up is None else torch.cuda.stream(self._up)

    def arrival(self) -> Callable[[], None]:
        """Return what waits, on the host, for the copies that have been enqueued so far."""
        if self._device is None:
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def join(self) -> None:
        """Let what follows wait for the copies."""
        for stream in (self._down, self._up):
            if stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(stream)


def _nothing() -> None:
    """Nothing is enqueued on a CPU."""
