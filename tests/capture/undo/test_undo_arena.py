"""Memory for undo copies: right contents, and mappings that follow what is needed."""

from itertools import pairwise

import pytest
import torch

from graphfsdp._capture.undo import undo_arena
from graphfsdp._capture.undo.undo_arena import UndoArena

MIB = 1 << 20


def take_all(arena: UndoArena, num_bytes: int) -> list[torch.Tensor]:
    pieces = []
    while num_bytes:
        pieces.append(arena.take(num_bytes))
        assert 1 <= pieces[-1].numel() <= num_bytes
        num_bytes -= pieces[-1].numel()
    return pieces


def test_pieces_keep_what_is_written_into_them() -> None:
    arena = UndoArena()
    pieces = [piece for size in (1, 3 * MIB, 17, MIB, 5 * MIB) for piece in take_all(arena, size)]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))
    assert sum(piece.numel() for piece in pieces) == 9 * MIB + 18


def test_mappings_grow_with_the_need_and_freed_pages_go_back_before_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, given_back_at = 0, []
    monkeypatch.setattr(undo_arena, "give_back_freed_pages", lambda: given_back_at.append(taken))
    arena = UndoArena()
    while taken < 200 * MIB:
        taken += arena.take(MIB // 2).numel()  # reserved only: nothing is written
    given_back_at.append(taken)
    gaps = [end - start for start, end in pairwise(given_back_at)]
    assert gaps[0] == MIB, "the state of a small model shares a mapping with its activations"
    # What was freed while a mapping was filled is an eighth of the copies at most, or a mebibyte.
    for start, gap in zip(given_back_at, gaps, strict=False):
        assert gap <= max(start // 8, MIB)
    assert max(gaps) == 16 * MIB
    assert len(gaps) < 45, "giving back takes milliseconds"
