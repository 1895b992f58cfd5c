"""The memory in which the programs of one captured step compute, one after the other."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp.base.host_memory import advise_huge_pages


class Arena:
    """One storage that grows in place.

    Note [Shared arena]: the graphs of one captured step (a graph for each signature, another for
    evaluation) never run at a time, and none reads what another left. So all of them plan their
    memory from the first byte of the same storage, and together they need what the largest needs.
    A storage that grows moves, but tensors follow their storage: programs built before stay valid.
    """

    def __init__(self) -> None:
        # The programs hold the storage, so that it goes with the last of them.
        self._storage: StorageWeakRef | None = None

    @property
    def num_bytes(self) -> int:
        """Its present size."""
        storage = self._alive()
        return 0 if storage is None else storage.nbytes()

    def reserve(self, num_bytes: int) -> torch.UntypedStorage:
        """Return the storage, which has at least ``num_bytes``; contents are lost if it grows."""
        storage = self._alive()
        if storage is None:
            storage = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
            advise_huge_pages(storage)
            self._storage = StorageWeakRef(storage)
        elif storage.nbytes() < num_bytes:
            storage.resize_(0)  # so that old and new memory are never there together
            storage.resize_(num_bytes)
            advise_huge_pages(storage)
        return storage

    def _alive(self) -> torch.UntypedStorage | None:
        if self._storage is None:
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
