"""Copies of what the end of a replay overwrites, where they cost next to nothing."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from graphfsdp._capture.trace.values import Node
from graphfsdp._capture.undo.node_cost import copies_are_cheap

_OWN_BYTES = 2 << 20  # memory that the copies may take for themselves
_SMALLEST_GAP = 1 << 16  # of dead memory: smaller ones would make too many copies


class LateCopies:
    """What a replay overwrites behind its commit point: weights and optimizer state.

    Note [Late copies]: they are made in each replay at the commit point, just before the first
    weight is written, because then most memory of the iteration is dead and can hold them, and
    because the optimizer finds in the cache what has just been copied.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Prepare.

        Args:
            pairs: [B] uint8 each: memory that is overwritten, and memory for its copy.
        """
        pairs = list(pairs)
        self._kept = [kept for kept, _ in pairs]
        self._copies = [copy for _, copy in pairs]
        self._is_taken = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied in each replay."""
        return sum(kept.numel() for kept in self._kept)

    def begin(self) -> None:
        """Begin a replay, which has overwritten nothing yet."""
        self._is_taken = False

    def take(self) -> None:
        """Copy; called at the commit point."""
        if self._kept:
            torch._foreach_copy_(self._copies, self._kept)
        self._is_taken = True

    def put_back(self) -> None:
        """Undo what came behind the commit point, if the replay has come so far; once."""
        if self._is_taken and self._kept:
            torch._foreach_copy_(self._kept, self._copies)
        self._is_taken = False


def find_late_copies(
    kept: Sequence[Tensor],
    nodes: Sequence[Node],
    dead: Sequence[Tensor],
    is_called: Callable[[Node], bool],
) -> LateCopies | None:
    """Return copies of some memory, or None where they would cost too much time or memory.

    Args:
        kept: [B] uint8, memory that is overwritten behind the commit point, each byte once.
        nodes: The program.
        dead: [B] uint8, memory of the program that nobody needs from the commit point on.
        is_called: Tells whether a replay calls a node.
    """
    pairs, rest = _place(kept, [gap for gap in dead if gap.numel() >= _SMALLEST_GAP])
    if sum(view.numel() for view in rest) > _OWN_BYTES:
        return None
    called = [node for node in nodes if is_called(node)]
    num_bytes = sum(view.numel() for view in kept)
    if not copies_are_cheap(num_bytes, len(pairs) + len(rest), called):
        return None
    return LateCopies([*pairs, *((view, torch.empty_like(view)) for view in rest)])


def _place(
    kept: Sequence[Tensor], gaps: Sequence[Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Fill gaps one after the other; return what lies where, and what finds no place."""
    pairs = []
    waiting = list(reversed(kept))
    for whole in gaps:
        gap = whole
        while waiting and gap.numel():
            view = waiting.pop()
            size = min(view.numel(), gap.numel())
            pairs.append((view[:size], gap[:size]))
            gap = gap[size:]
            if size < view.numel():
                waiting.append(view[size:])
    return pairs, waiting
