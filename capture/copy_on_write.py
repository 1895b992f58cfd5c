"""Undoes a failed CPU recording: storages and generators as they were before the first write."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.storages import StorageInfo


class CopyOnWrite:
    """Old contents of everything that a recording has written outside itself.

    On CUDA nothing runs during a capture. On a CPU the recording is also the iteration, so a
    failed one must be taken back; a copy is made only of what is written, just before.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, tuple[StorageInfo, Tensor]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def save(self, info: StorageInfo) -> None:
        """Keep the contents of a storage that is about to be written."""
        if id(info) not in self._bytes:
            self._bytes[id(info)] = (info, _as_bytes(info.get()).clone())

    def save_generators(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the state of the generators that an operator is about to draw from."""
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
        for generator in given or [torch.default_generator]:
            if id(generator) not in self._generators:
                self._generators[id(generator)] = (generator, generator.get_state())

    def roll_back(self) -> None:
        """Write everything back, at the addresses that it had."""
        for info, old in self._bytes.values():
            if info.alive:
                _as_bytes(info.get()).copy_(old)
        for generator, state in self._generators.values():
            generator.set_state(state)

    @property
    def num_bytes(self) -> int:
        """Bytes copied so far."""
        return sum(old.numel() for _, old in self._bytes.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)


__all__ = ["CopyOnWrite"]
