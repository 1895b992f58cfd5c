"""Random numbers: what an operator draws depends on the Philox state that torch gives it.

Outside of captures that is the generator's seed and offset. In a capture torch keeps both in
tensors of the graph, which it fills before each launch (torch 2.11 also before the capture), and
counts on within the graph; so a replay draws what the same operator would have drawn eagerly.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NUM_FILLS_KEPT = 64
_FILLS_BEFORE_CAPTURE = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
_SMALLEST_SIZE = 4  # of what has not run outside of captures before


class Draw(NamedTuple):
    """The place of one operator in the numbers of a generator."""

    seed: int
    offset: int

    def generator(self) -> torch.Generator:
        """Return a generator of its own for each pair."""
        mixed = self.seed * 6364136223846793005 + self.offset * 1442695040888963407 + 12345
        return torch.Generator().manual_seed(mixed & 0x7FFF_FFFF_FFFF_FFFF)


Place = Callable[[], Draw]


def _read(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


class Draws:
    """Knows where captured generators have their state, and how far each operator counts on."""

    def __init__(self) -> None:
        self._fills: list[tuple[int, int]] = []  # addresses and values, the last ones
        self._sizes: dict[tuple[Any, ...], int] = {}  # by operator and arguments
        self._captured: dict[tuple[int, int], _Captured] = {}  # by capture and seed

    def note_fill(self, target: Tensor, value: int) -> None:
        """Note that a number was written: torch fills a graph's seed and then its offset."""
        self._fills.append((target.data_ptr(), value))
        del self._fills[:-_NUM_FILLS_KEPT]

    def begin(
        self, generator: torch.Generator, capture_id: int, call: tuple[Any, ...]
    ) -> tuple[Place, Callable[[], None]]:
        """Return what tells the place of a draw, and what is called after the operator.

        ``call`` is the operator with what decides how many numbers it draws.
        """
        if capture_id:
            captured = self._captured_state(capture_id, generator.initial_seed())
            before = captured.used
            captured.used += self._sizes.get(call, _SMALLEST_SIZE)

            def later() -> Draw:
                captured.places = captured.places or self._last_pair(captured.seed)
                if captured.places is None:
                    raise RuntimeError("the stand-in has not seen where a graph keeps its seed")
                seed_at, offset_at = captured.places
                return Draw(_read(seed_at), _read(offset_at) + before)

            return later, lambda: None
        seed, offset = generator.initial_seed(), generator.get_offset()

        def note_size() -> None:
            self._sizes[call] = generator.get_offset() - offset

        return lambda: Draw(seed, offset), note_size

    def _captured_state(self, capture_id: int, seed: int) -> "_Captured":
        key = capture_id, seed
        if key not in self._captured:
            self._captured[key] = _Captured(seed)
            if _FILLS_BEFORE_CAPTURE:
                self._captured[key].places = self._last_pair(seed, offset=0)
        return self._captured[key]

    def _last_pair(self, seed: int, offset: int | None = None) -> tuple[int, int] | None:
        """Return where torch has filled in a seed and, right behind it, an offset.

        None for a generator that the capture does not know; torch refuses it a moment later.
        """
        pairs = list(zip(self._fills, self._fills[1:], strict=False))
        for (seed_at, value), (offset_at, next_value) in reversed(pairs):
            if value == seed and offset in (None, next_value):
                return seed_at, offset_at
        return None


class _Captured:
    """The state of a generator in a capture."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.places: tuple[int, int] | None = None  # of seed and offset; None: not known yet
        self.used = 0  # by operators that were captured so far
