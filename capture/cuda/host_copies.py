"""Undoes an iteration on a GPU: copies of all state in host memory."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from graphfsdp._capture.trace.values import as_bytes
from graphfsdp.base.dtensors import local_part
from graphfsdp.base.memory import available_bytes
from graphfsdp.errors import CaptureError

# torch rounds page-locked memory up to a power of two.
_CHUNK_BYTES = 1 << 26


class PinnedMemory:
    """Page-locked chunks that the attempts of a step, one after the other, use again.

    Through pageable memory the driver would copy piece by piece, and the host wait for each.
    """

    def __init__(self) -> None:
        self._spare: list[Tensor] = []
        self._is_over = False

    def take(self, num_bytes: int) -> list[Tensor]:
        """Return chunks of one size that have room for so much."""
        size = min(_CHUNK_BYTES, num_bytes)
        wanted = -(-num_bytes // size) if size else 0
        fitting = [chunk for chunk in self._spare if chunk.numel() == size][:wanted]
        self._spare = []
        missing = wanted - len(fitting)
        _refuse_too_much(missing * size, num_bytes)
        return fitting + [_chunk(size) for _ in range(missing)]

    def give_back(self, chunks: list[Tensor]) -> None:
        if self._is_over:
            chunks.clear()
            torch._C._host_emptyCache()
        self._spare += chunks

    def end(self) -> None:
        """Keep nothing from now on, and leave nothing in torch's cache."""
        self._is_over = True
        self._spare = []


class HostCopies:
    """The contents of known tensors, kept in host memory.

    Note [Undo on a GPU]: a copy on write, as on a CPU, would need a dispatch mode, under which
    torch.compile compiles nothing, and which does not see kernels that libraries launch by
    themselves. So all known state is copied before the iteration; to the host, so that the peak of
    device memory, which may be all there is, stays what it was.
    """

    def __init__(self, state: Iterable[Tensor], memory: PinnedMemory) -> None:
        storages = {
            local.untyped_storage()._cdata: local.untyped_storage()
            for tensor in state
            for local in [local_part(tensor)]
            if local.layout is torch.strided
            and not torch._C._functorch.is_functorch_wrapped_tensor(local)  # as vmap leaves them
        }
        self._contents = [as_bytes(storage) for storage in storages.values()]
        self._memory = memory
        self._chunks: list[Tensor] = []  # none, if it is refused
        self._chunks = memory.take(sum(each.numel() for each in self._contents))
        for contents, copy in self._pieces():
            copy.copy_(contents, non_blocking=True)
        self._wait()

    def __del__(self) -> None:
        self._memory.give_back(self._chunks)

    def watching(self) -> AbstractContextManager[object]:
        """Return nothing to enter: everything has been copied already."""
        return nullcontext()

    def roll_back(self) -> None:
        for contents, copy in self._pieces():
            contents.copy_(copy, non_blocking=True)
        self._wait()

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield stretches of the state, each with its place in the chunks, which are filled up."""
        place = 0
        for contents in self._contents:
            left = contents
            while left.numel():
                index, start = divmod(place, self._chunks[0].numel())
                room = self._chunks[index][start : start + left.numel()]
                yield left[: room.numel()], room
                place += room.numel()
                left = left[room.numel() :]

    def _wait(self) -> None:
        for device in {contents.device for contents in self._contents if contents.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _refuse_too_much(num_bytes: int, num_all: int) -> None:
    """CaptureError before the system kills this process for what it takes."""
    room = available_bytes()
    if room is not None and num_bytes > room:
        raise CaptureError(
            "so that a failed warm-up or capture leaves no trace, this rank would keep "
            f"{num_all / 2**30:.2f} GiB (weights, gradients, optimizer state) in memory of the "
            f"host, {num_bytes / 2**30:.2f} GiB more than now, and may take {room / 2**30:.2f} GiB "
            "(what the machine and the limits of its control groups leave, by ranks). Remedy: more "
            "memory for the job, or capture(..., undo='none'), which keeps no copies: a warm-up "
            "that fails then leaves the step broken"
        )


def _chunk(num_bytes: int) -> Tensor:
    """Of pageable memory where the system grants no more of the other: slower, and as good."""
    with suppress(RuntimeError):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
