"""Decides how a program's replays are undone: what is copied, when, and up to where."""

from collections.abc import Sequence

from torch import Tensor

from graphfsdp._capture.cpu.program import ProgramBuilder
from graphfsdp._capture.trace.values import Value, materialise
from graphfsdp._capture.undo.commit_point import (
    CommitPoint,
    find_commit_point,
    find_everything_written,
)
from graphfsdp._capture.undo.late_copies import LateCopies, find_late_copies
from graphfsdp._capture.undo.replay_undo import ReplayUndo, merged_bytes


def plan_undo(
    builder: ProgramBuilder, scratch: Sequence[Tensor], *, always: bool, if_cheap: bool
) -> tuple[ReplayUndo, int | None]:
    """Return what undoes a replay, and the node before which its commit is to be called.

    Args:
        builder: The program.
        scratch: Tensors whose old contents nobody needs.
        always: Undo every replay, also one that is over, with these tensors' old contents.
        if_cheap: Undo what fails behind the commit point where copies for it are cheap.
    """
    if always:
        point = find_everything_written(builder.nodes)
        kept = merged_bytes([*_tensors(point.kept), *builder.escaped])
        return ReplayUndo(kept, point.generators, is_whole=True), point.node
    point = find_commit_point(builder.nodes, scratch)
    late, generators = None, point.generators
    if if_cheap:
        everything = find_everything_written(builder.nodes, scratch)
        late = _late_copies(builder, point, everything)
        generators = generators if late is None else everything.generators
    return ReplayUndo(_tensors(point.kept), generators, late=late), point.node


def _late_copies(
    builder: ProgramBuilder, point: CommitPoint, everything: CommitPoint
) -> LateCopies | None:
    early = set(map(id, point.kept))
    late = _tensors([value for value in everything.kept if id(value) not in early])
    commit_node = len(builder.nodes) if point.node is None else point.node
    return find_late_copies(
        merged_bytes([*late, *builder.escaped]),
        builder.nodes,
        builder.memory.free_from(commit_node),
        lambda node: not builder.memory.needs_no_call(node),
    )


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    return [materialise(value, value.storage.get()) for value in values]
