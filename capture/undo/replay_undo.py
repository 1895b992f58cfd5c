"""Undoes a replay on a CPU that failed: before it wrote weights, or anywhere."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from graphfsdp._capture.trace.backend import Effect
from graphfsdp._capture.undo.copy_on_write import byte_range
from graphfsdp._capture.undo.late_copies import LateCopies

_MAX_GAP_BYTES = 4096


class ReplayUndo:
    """What a replay writes before its commit point, as it was (see Note [Undo of a replay]).

    Attributes:
        effect: What the last replay has done.
        is_whole: Every replay can be undone, also one that is over.
    """

    effect: Effect

    def __init__(
        self,
        kept: Sequence[Tensor],
        generators: Sequence[torch.Generator],
        *,
        is_whole: bool = False,
        late: LateCopies | None = None,
    ) -> None:
        """Prepare.

        Args:
            kept: Tensors that a replay writes before its commit point.
            generators: Generators that it draws from before it.
            is_whole: These are all that it writes: there is no commit point.
            late: Copies of what it writes behind its commit point; None where there are none.
        """
        self.is_whole = is_whole
        self._late = late
        self._kept = list(kept)
        self._copies = [torch.empty_like(tensor) for tensor in kept]
        self._generators = list(generators)
        self._states: list[Tensor] = []
        self._is_ready = False
        self.effect = Effect.NONE

    @property
    def undoes_all(self) -> bool:
        """Whether a replay is undone wherever it fails."""
        return self.is_whole or self._late is not None

    def begin(self) -> None:
        """Copy; called before each replay."""
        self.effect, self._is_ready = Effect.NONE, False
        if self._late is not None:
            self._late.begin()
        if self._kept:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._kept)
        self._states = [generator.get_state() for generator in self._generators]
        self._is_ready = True

    def keep(self) -> None:
        """Let the last replay stand; nothing can be put back until the next one begins."""
        self._is_ready = False

    def commit(self) -> None:
        """Copy what is written from here on; without copies it cannot be put back."""
        if self._late is not None:
            self._late.take()
        elif not self.is_whole:
            self.effect = Effect.PART

    def roll_back(self) -> None:
        """Put everything back, unless it is too late."""
        if not self._is_ready or (self.effect is not Effect.NONE and not self.is_whole):
            return
        self.effect = Effect.NONE
        if self._late is not None:  # first: the others are older
            self._late.put_back()
        if self._kept:
            torch._foreach_copy_(self._kept, self._copies)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


def merged_bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return [B] uint8 views of all memory that some tensors look at, each byte once.

    Small gaps between them (the padding of flat buffers) are in, as another copy costs more.

    Args:
        tensors: Strided ones; they may overlap.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        ranges.setdefault(storage._cdata, []).append(byte_range(tensor))
    views = []
    for key, found in ranges.items():
        whole = torch.empty(0, dtype=torch.uint8).set_(storages[key])
        start, end = min(found)
        for first, last in sorted(found):
            if first > end + _MAX_GAP_BYTES:
                views.append(whole[start:end])
                start = first
            end = max(end, last)
        views.append(whole[start:end])
    return [view for view in views if view.numel()]
