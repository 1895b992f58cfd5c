"""What calls of the loop do to memory and to generators, and what tells of that."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp.base.op_tensors import OpCall, OperatorMode, storage_key
from graphfsdp.base.torch_internals import key_of, num_users


class Watch(OperatorMode):
    """The storages that operators write, whether or not a version tells of it, and make."""

    joins = True

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.made: dict[int, StorageWeakRef] = {}  # while it is held, its number is not used again

    def on_op(self, call: OpCall) -> Any:
        self.written.update(map(storage_key, call.written))
        result = call.run()
        for tensor, key in call.made(result):
            self.made[key] = StorageWeakRef(tensor.untyped_storage())
        return result


def look_of(tensor: Tensor) -> object:
    """Return what changes when a tensor is given other memory, or looks at it in another way."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def is_alone(tensor: Tensor) -> bool:
    """Tell whether nobody else has a tensor's memory, who would see that a write is put off."""
    storage = tensor.untyped_storage()
    # One for the tensor, and one for this. NumPy's memory cannot be resized, nor what NumPy sees.
    is_torchs = storage.resizable() and num_users(key_of(storage)) <= 2
    return is_torchs and not tensor._is_view()


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def random_states(kind: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if kind == "cpu" else [*states, torch.cuda.get_rng_state()]


def moved(before: Sequence[Tensor], now: Sequence[Tensor]) -> frozenset[int]:
    pairs = enumerate(zip(before, now, strict=True))
    return frozenset(place for place, (a, b) in pairs if not torch.equal(a, b))
