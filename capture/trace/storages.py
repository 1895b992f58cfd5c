"""What a recording knows of every storage that it meets, without keeping any of them alive."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp.base.hazards import HazardKind
from graphfsdp.errors import CaptureError, SourceLine


@dataclass(eq=False, slots=True)
class StorageInfo:
    """One storage.

    Attributes:
        ref: Weak reference; while it exists, torch cannot reuse the storage's identity.
        external: It existed before the recording.
        varies: Its contents differ from replay to replay, because they derive from an existing
            tensor or from the RNG. Constants made inside the iteration do not vary.
        filled: Some operator, or somebody before the recording, has written contents into it.
        first_use: The user's line at which an external storage was first seen.
    """

    ref: StorageWeakRef
    external: bool
    varies: bool
    filled: bool = True
    first_use: SourceLine | None = None

    @property
    def alive(self) -> bool:
        """Whether anything but this recording still holds the storage."""
        return not self.ref.expired()

    def get(self) -> torch.UntypedStorage:
        """ReferenceError if it has been freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if storage is None:
            raise ReferenceError("the storage has been freed")
        return storage


def storage_of(tensor: Tensor, op: str) -> torch.UntypedStorage:
    """CaptureError if there is none (sparse and other special layouts)."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # what torch raises for sparse and opaque layouts, and under vmap
        raise CaptureError(
            f"a tensor of layout {tensor.layout} has no storage that a graph could hold at a "
            "fixed address. Remedy: use strided (dense) tensors inside the iteration",
            op=op,
            kind=HazardKind.MEMORY,
        ) from None


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last that a strided tensor looks at."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def identity_of(tensor: Tensor) -> int:
    """Return what tells the storage under a tensor from others that live; 0 if it has none."""
    try:
        return int(storage_of(tensor, "identity")._cdata)
    except CaptureError:
        return 0


def has_storage(tensor: Tensor) -> bool:
    if tensor.layout is torch.strided:
        return True  # of the wrappers that have none, none gets here
    try:
        storage_of(tensor, "")
    except CaptureError:
        return False
    return True


class StorageTable:
    def __init__(self) -> None:
        self._infos: dict[int, StorageInfo] = {}

    def find(self, tensor: Tensor, op: str) -> StorageInfo | None:
        return self._infos.get(storage_of(tensor, op)._cdata)

    def add(self, tensor: Tensor, op: str, *, external: bool, varies: bool) -> StorageInfo:
        """Register the storage of a tensor that was never seen before."""
        storage = storage_of(tensor, op)
        info = StorageInfo(StorageWeakRef(storage), external, varies)
        self._infos[storage._cdata] = info
        return info

    def __iter__(self) -> Iterator[StorageInfo]:
        return iter(self._infos.values())


def refuse_dropped_tensors(storages: Iterable[StorageInfo]) -> None:
    """Refuse an iteration that used a tensor from before it and then let it go."""
    for error in dropped_tensors(storages):
        raise error


def dropped_tensors(storages: Iterable[StorageInfo]) -> Iterator[CaptureError]:
    """Yield a refusal of each tensor from before the iteration that it used and then let go.

    Whoever does that has put a new tensor in its place for the next iteration to read (a running
    average kept by assignment, say); a replay would read the old one, or freed memory, for ever.
    """
    for info in storages:
        if info.external and not info.alive:
            yield CaptureError(
                "the iteration read a tensor that existed before it and then dropped it: either "
                "a new tensor was assigned in its place (a replay would go on reading the old "
                "one), or it was made outside torch's operators (torch.from_numpy). Remedy: "
                "update kept tensors in place (copy_, mul_, add_), and make constants outside "
                "the iteration",
                source=info.first_use,
            )
