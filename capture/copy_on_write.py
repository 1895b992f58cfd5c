"""Undoes a failed CPU recording: memory and generators as they were before the first write."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.storages import StorageInfo
from graphfsdp._capture.undo_arena import UndoArena

_Range = tuple[int, int]  # first byte, byte after the last


class CopyOnWrite:
    """Old contents of everything that a recording has written outside itself.

    On CUDA nothing runs during a capture. On a CPU the recording is also the iteration, so a
    failed one must be taken back; a copy is made only of what is written, just before.
    """

    def __init__(self) -> None:
        self._arena = UndoArena()
        self._saved: list[tuple[StorageInfo, int, Tensor]] = []  # storage, first byte, contents
        self._ranges: dict[int, set[_Range]] = {}  # by id of the StorageInfo
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def save(self, info: StorageInfo, tensor: Tensor) -> None:
        """Keep the contents of the memory that a tensor looks at and that is about to change.

        Args:
            info: The tensor's storage.
            tensor: What will be written.
        """
        start, end = _byte_range(tensor)
        ranges = self._ranges.setdefault(id(info), set())
        if any(first <= start and end <= last for first, last in ranges):
            return
        ranges.add((start, end))
        contents = _as_bytes(info.get())
        while start < end:
            piece = self._arena.take(end - start)
            piece.copy_(contents[start : start + piece.numel()])
            self._saved.append((info, start, piece))
            start += piece.numel()

    def save_generators(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the state of the generators that an operator is about to draw from."""
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
        for generator in given or [torch.default_generator]:
            if id(generator) not in self._generators:
                self._generators[id(generator)] = (generator, generator.get_state())

    def roll_back(self) -> None:
        """Write everything back, at the addresses that it had."""
        # Newest first: where ranges overlap, the copy that was made first is the oldest contents.
        for info, first, old in reversed(self._saved):
            if info.alive:
                _as_bytes(info.get())[first : first + old.numel()].copy_(old)
        for generator, state in self._generators.values():
            generator.set_state(state)


def _byte_range(tensor: Tensor) -> _Range:
    if tensor.numel() == 0:
        return (0, 0)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return (start, start + span * tensor.element_size())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


__all__ = ["CopyOnWrite"]
