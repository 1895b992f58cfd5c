"""A count in memory of C, which no snapshot of Python sees: for what happens by chance."""

import ctypes
from collections.abc import Iterator
from typing import Any


class Unseen(Iterator[Any]):
    """Gives one value after the other, and the last for ever; no capture tries it in advance.

    An iterator that an iteration advances is refused, and a number that it moves is rehearsed.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values
        self._count = ctypes.c_long(0)

    @property
    def num_calls(self) -> int:
        return self._count.value

    def __next__(self) -> Any:
        value = self.values[min(self._count.value, len(self.values) - 1)]
        self._count.value += 1
        return value
