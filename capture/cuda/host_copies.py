"""Undoes an iteration on a GPU: copies of all state in host memory."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part


class HostCopies:
    """The contents of known tensors, kept in host memory.

    Note [Undo on a GPU]: a copy on write, as on a CPU, would need a dispatch mode, under which
    torch.compile compiles nothing, and which does not see kernels that libraries launch by
    themselves. So all known state is copied before the iteration; to the host, so that the peak of
    device memory, which may be all there is, stays what it was.
    """

    def __init__(self, state: Iterable[Tensor]) -> None:
        storages = {
            local.untyped_storage()._cdata: local.untyped_storage()
            for tensor in state
            for local in [local_part(tensor)]
            if local.layout is torch.strided
        }
        self._saved = [(_as_bytes(storage), storage) for storage in storages.values()]
        self._copies = [contents.to("cpu", copy=True) for contents, _ in self._saved]

    def watching(self) -> AbstractContextManager[None]:
        """Return nothing to enter: everything has been copied already."""
        return nullcontext()

    def roll_back(self) -> None:
        for (contents, _), old in zip(self._saved, self._copies, strict=True):
            contents.copy_(old)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
