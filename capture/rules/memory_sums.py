"""Notices memory that changes without an operator."""

from collections.abc import Iterable

import torch
from torch import Tensor

from graphfsdp._capture.trace.storages import StorageInfo, has_storage


class MemorySums:
    """What the memory of tensors from outside an iteration held when the iteration began.

    An array of NumPy, or a C library, may share it and write to it.
    """

    def __init__(self, storages: Iterable[StorageInfo]) -> None:
        """Add up every storage from outside that is alive.

        Args:
            storages: Those that an earlier run has met.
        """
        self._infos = {info.ref.cdata: info for info in storages if info.external and info.alive}
        self._sums = {key: _sum(info.get()) for key, info in self._infos.items()}

    def has_changed(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory has changed; later calls for the same memory say no."""
        if not has_storage(tensor):
            return False
        storage = tensor.untyped_storage()
        before = self._sums.pop(storage._cdata, None)
        return before is not None and before != _sum(storage)

    def num_changed(self) -> int:
        """Return how many storages that nobody has asked for have changed."""
        left = [(self._infos[key], before) for key, before in self._sums.items()]
        return sum(info.alive and _sum(info.get()) != before for info, before in left)


def _sum(storage: torch.UntypedStorage) -> tuple[int, int]:
    whole = storage.nbytes() // 4 * 4
    contents = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    words = contents[:whole].view(torch.int32)
    return int(words.sum(dtype=torch.int64)), int(contents[whole:].sum(dtype=torch.int64))
