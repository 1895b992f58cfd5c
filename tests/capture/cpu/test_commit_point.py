"""How far a replay can be undone: what is kept for it, and what is not."""

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.cpu.graph import find_commit_point
from graphfsdp._capture.trace.values import Node, StorageInfo, Value, geometry_of


def writes(*tensors: Tensor) -> Node:
    values = []
    for tensor in tensors:
        info = StorageInfo(StorageWeakRef(tensor.untyped_storage()), external=True, varies=True)
        values.append(Value(info, geometry_of(tensor), None))
    op = torch.ops.aten._foreach_add_.Scalar
    return Node(op, [values, 1.0], {}, [], "none")


SMALL, LARGE, HALF = 4, 1 << 19, 1 << 17


@pytest.mark.parametrize(
    ("nodes", "commits_at", "num_kept"),
    [
        ([[SMALL], [LARGE]], 1, 1),  # small writes before the first large one
        ([[SMALL], [HALF] * 4], 1, 1),  # too much in all
        ([[1] * 9], 0, 0),  # too many tensors
        ([[2, 3], [4]], None, 3),  # all is small
    ],
)
def test_what_is_written_before_the_first_large_write_is_kept(
    nodes: list[list[int]], commits_at: int | None, num_kept: int
) -> None:
    held = [[torch.zeros(size) for size in sizes] for sizes in nodes]
    point = find_commit_point([writes(*tensors) for tensors in held], [])
    assert point.node == commits_at
    first = [geometry_of(tensor) for tensors in held[:commits_at] for tensor in tensors]
    assert [value.geometry for value in point.kept] == first
    assert len(first) == num_kept
