"""How far a replay can be undone: what is kept for it, and what is not."""

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


def test_small_writes_before_the_first_large_one_are_kept() -> None:
    statistics, weight = torch.zeros(4), torch.zeros(1 << 19)
    nodes = [writes(statistics), writes(weight)]
    point = find_commit_point(nodes, [])
    assert point.node == 1
    assert [value.geometry for value in point.kept] == [geometry_of(statistics)]


def test_nothing_is_kept_of_an_operator_that_writes_too_much_in_all() -> None:
    statistics, weights = torch.zeros(4), [torch.zeros(1 << 17) for _ in range(4)]
    nodes = [writes(statistics), writes(*weights)]
    point = find_commit_point(nodes, [])
    assert point.node == 1
    assert [value.geometry for value in point.kept] == [geometry_of(statistics)]


def test_nothing_is_kept_of_an_operator_that_writes_too_many_tensors() -> None:
    held = [torch.zeros(1) for _ in range(9)]
    nodes = [writes(*held)]
    point = find_commit_point(nodes, [])
    assert point.node == 0
    assert not point.kept


def test_all_is_kept_where_all_is_small() -> None:
    held = [torch.zeros(size) for size in (2, 3, 4)]
    nodes = [writes(*held[:2]), writes(held[2])]
    point = find_commit_point(nodes, [])
    assert point.node is None
    assert len(point.kept) == 3
