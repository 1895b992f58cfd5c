"""Learns which words of a tensor tell of its memory, shape, dtype and requires_grad."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.process_memory import WORD, ProcessMemory

MAX_NDIM = 5  # torch keeps shapes of more dimensions elsewhere
# What is read at most, less than these objects have in any torch from 2.11 to 2.13.
_TENSOR_WORDS = 22
_STORAGE_WORDS = 6
_AUTOGRAD_WORDS = 20
_PROBE_ELEMENTS = 4096


class NotLearnedError(Exception):
    """A change of a tensor that no word has told of; guards ask tensors instead."""


class TensorWords:
    """Places of words in Python's tensor object, in torch's, in its storage and autograd's part.

    Each place is learned by changing a tensor made for it in all the ways that a guard has to
    notice: another storage, offset, size or stride of a dimension, dtype, number of dimensions,
    and requires_grad.
    """

    def __init__(self, memory: ProcessMemory) -> None:
        """Learn the places.

        Args:
            memory: Reads words.

        Raises:
            NotLearnedError: A change was seen in no word.
        """
        self._memory = memory
        self._by_ndim: dict[int, tuple[int, ...]] = {}
        probe = _probe(1)
        self._pointer = _find(memory, id(probe), type(probe).__basicsize__, probe._cdata)
        storage = probe.untyped_storage()
        tensor_bytes = _TENSOR_WORDS * WORD
        self._storage = _find(memory, probe._cdata, tensor_bytes, storage._cdata)
        self._data = _find(memory, storage._cdata, _STORAGE_WORDS * WORD, storage.data_ptr())
        storage.resize_(2 * storage.nbytes())
        if memory.read(storage._cdata, _STORAGE_WORDS)[self._data] != storage.data_ptr():
            raise NotLearnedError("the address of a storage")
        self.address = self._told_by(1, (_other_storage, _other_offset))
        self._autograd, self._requires_grad = self._learn_requires_grad()

    def pointer(self, tensor: Tensor) -> int:
        """Return the address of the word, in Python's object, that points to torch's."""
        return self._checked(id(tensor), self._pointer, tensor._cdata)

    def storage(self, tensor: Tensor) -> int:
        """Return the address of the word, in a tensor's storage, that points to its memory."""
        storage = tensor.untyped_storage()
        self._checked(tensor._cdata, self._storage, storage._cdata)
        return self._checked(storage._cdata, self._data, storage.data_ptr())

    def facts(self, tensor: Tensor) -> list[int]:
        """Return the addresses of words that tell of its storage, shape, strides and dtype."""
        ndim = tensor.dim()
        if ndim > MAX_NDIM:
            raise NotLearnedError(f"the shape of a tensor of {ndim} dimensions")
        if ndim not in self._by_ndim:
            self._by_ndim[ndim] = self._told_by(ndim, tuple(_changes(ndim)))
        return [tensor._cdata + WORD * index for index in self._by_ndim[ndim]]

    def place(self, tensor: Tensor) -> list[int]:
        """Return the addresses of words that tell of its storage, and of its place in there."""
        return [tensor._cdata + WORD * index for index in self.address]

    def autograd(self, tensor: Tensor) -> int:
        """Return the address of the word that points to autograd's part of a tensor."""
        return tensor._cdata + WORD * self._autograd

    def requires_grad(self, tensor: Tensor) -> int | None:
        """Return the address of the word that tells of requires_grad; None: there is none yet."""
        part = self._memory.read(self.autograd(tensor), 1)[0]
        return part + WORD * self._requires_grad if part else None

    def _checked(self, address: int, index: int, expected: int) -> int:
        place = address + WORD * index
        if self._memory.read(place, 1) != [expected]:
            raise NotLearnedError("where a tensor lies")
        return place

    def _told_by(
        self, ndim: int, changes: tuple[Callable[[Tensor], Tensor], ...]
    ) -> tuple[int, ...]:
        """Return words of which at least one tells of each change, and that are else constant."""
        noise = self._noise(ndim)
        told: set[int] = set()
        for change in changes:
            probe = _probe(ndim).detach()
            before = self._read(probe)
            probe.data = change(probe.data)
            after = self._read(probe)
            seen = {index for index in range(_TENSOR_WORDS) if before[index] != after[index]}
            if not seen - noise:
                raise NotLearnedError(f"a change of a tensor of {ndim} dimensions")
            if not seen & told:
                told.add(min(seen - noise))
        return tuple(sorted(told))

    def _noise(self, ndim: int) -> set[int]:
        """Return the words that change while a tensor is merely used."""
        probe = _probe(ndim)
        before = self._read(probe)
        probe.grad = torch.ones_like(probe)
        probe.data.add_(1.0)
        kept = [probe.detach(), probe * 2.0]  # autograd keeps the tensor for the backward pass
        after = self._read(probe)
        del kept
        return {index for index in range(_TENSOR_WORDS) if before[index] != after[index]}

    def _learn_requires_grad(self) -> tuple[int, int]:
        probe = torch.zeros(2, device="cpu")
        before = self._read(probe)
        probe.requires_grad_()
        after = self._read(probe)
        grown = [index for index in range(_TENSOR_WORDS) if not before[index] and after[index]]
        if len(grown) != 1:
            raise NotLearnedError("autograd's part of a tensor")
        part = after[grown[0]]
        told = set(range(_AUTOGRAD_WORDS))
        for flag in (False, True, False, True):
            before = self._memory.read(part, _AUTOGRAD_WORDS)
            probe.requires_grad_(flag)
            after = self._memory.read(part, _AUTOGRAD_WORDS)
            told &= {index for index in told if before[index] != after[index]}
        if len(told) != 1:
            raise NotLearnedError("requires_grad")
        return grown[0], told.pop()

    def _read(self, tensor: Tensor) -> list[int]:
        return self._memory.read(tensor._cdata, _TENSOR_WORDS)


def _find(memory: ProcessMemory, address: int, num_bytes: int, value: int) -> int:
    words = memory.read(address, num_bytes // WORD)
    if words.count(value) < 1:
        raise NotLearnedError("a pointer")
    return words.index(value)


def _probe(ndim: int) -> nn.Parameter:
    memory = torch.zeros(_PROBE_ELEMENTS, device="cpu", dtype=torch.float32)
    shape = [2] * ndim
    return nn.Parameter(memory.as_strided(shape, [2 ** (ndim - 1 - i) for i in range(ndim)]))


def _other_storage(data: Tensor) -> Tensor:
    memory = torch.zeros(_PROBE_ELEMENTS, device="cpu")
    return memory.as_strided(data.shape, data.stride())


def _other_offset(data: Tensor) -> Tensor:
    return data.as_strided(data.shape, data.stride(), 7)


def _changes(ndim: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield changes of a tensor of so many dimensions, each of one thing alone."""
    yield from (_other_storage, _other_offset)
    for dim in range(ndim):
        yield lambda data, dim=dim: data.as_strided(  # type: ignore[misc]
            [size + (index == dim) for index, size in enumerate(data.shape)], data.stride()
        )
        yield lambda data, dim=dim: data.as_strided(  # type: ignore[misc]
            data.shape, [stride + 64 * (index == dim) for index, stride in enumerate(data.stride())]
        )
    yield lambda data: data.view(torch.int32)  # another dtype
    yield lambda data: data.as_strided((*data.shape, 0), (*data.stride(), 0))
