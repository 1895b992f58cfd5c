"""Merging of neighbouring tensors into flat runs."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphfsdp.optim.fused.flat_runs import flat_view, is_dense, merge_neighbours, same_layout


def _slices(sizes: list[int], gaps: list[int], dtype: torch.dtype) -> list[Tensor]:
    buffer = torch.zeros(sum(sizes) + sum(gaps), dtype=dtype)
    tensors, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        tensors.append(buffer[end : end + size])
        end += size + gap
    return tensors


def _columns(*gaps: list[int] | None, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """Return bundles of three parameters; a column without gaps has no tensors."""
    found = [
        [None] * 3 if gap is None else _slices([4, 6, 2], gap, dtype)
        for gap, dtype in zip(gaps, dtypes, strict=True)
    ]
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(
    ("gaps", "members"),
    [
        (([0, 0, 0], [0, 0, 0]), [(0, 1, 2)]),
        (([0, 0, 0], [0, 3, 0]), [(0, 1), (2,)]),
        (([0, 0, 0], None), [(0, 1, 2)]),
    ],
)
def test_what_are_neighbours_in_all_columns_becomes_one_run(gaps: Any, members: Any) -> None:
    bundles = _columns(*gaps, dtypes=(torch.bfloat16, torch.float32))
    runs = merge_neighbours(bundles)
    assert [run.members for run in runs] == members
    for run in runs:
        first = bundles[run.members[0]]
        for column, tensor in enumerate(run.tensors):
            if tensor is not None:
                assert tensor.shape == (sum(bundles[i][0].numel() for i in run.members),)
                assert tensor.data_ptr() == first[column].data_ptr()
    backwards = merge_neighbours(bundles[::-1])
    assert [tuple(2 - i for i in run.members) for run in backwards] == members


def test_what_only_touches_is_not_merged() -> None:
    memory = torch.zeros(8)
    left = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4)
    right = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=16)
    assert left.data_ptr() + 16 == right.data_ptr()
    assert len(merge_neighbours([(left,), (right,)])) == 2
    other_dtype = memory[:4], memory.view(torch.int32)[4:]
    assert len(merge_neighbours([(tensor,) for tensor in other_dtype])) == 2
    first, second = _slices([4, 6], [0, 0], torch.float32)
    assert len(merge_neighbours([(first, None), (second, second)])) == 2
    assert merge_neighbours([]) == []


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    data=st.data(),
)
def test_runs_cover_every_element_once_and_are_maximal(
    sizes: list[int], data: st.DataObject
) -> None:
    gaps = data.draw(
        st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)), label="gaps"
    )
    tensors = _slices(sizes, gaps, torch.float32)
    order = data.draw(st.permutations(range(len(sizes))), label="order")
    runs = merge_neighbours([(tensors[index],) for index in order])
    for number, run in enumerate(runs, start=1):
        assert run.tensors[0] is not None
        run.tensors[0].add_(number)
    covered = sorted(order[member] for run in runs for member in run.members)
    assert covered == [index for index, size in enumerate(sizes) if size]
    assert all(bool((tensor > 0).all()) for tensor in tensors)
    # The number of maximal stretches, counted from the sizes and gaps alone.
    num_stretches, inside, gap_before = 0, False, 1
    for size, gap in zip(sizes, gaps, strict=True):
        if size:
            num_stretches += not inside or gap_before > 0
            inside, gap_before = True, 0
        gap_before += gap
    assert len(runs) == num_stretches


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(1).expand(5), False),
        (torch.zeros(6)[::2], False),
    ],
)
def test_dense_means_one_stretch_each_element_once(tensor: Tensor, expected: bool) -> None:
    assert is_dense(tensor.shape, tensor.stride()) is expected


@given(st.lists(st.integers(1, 3), min_size=0, max_size=4), st.randoms())
def test_every_permutation_of_a_contiguous_tensor_is_dense(
    shape: list[int], random: object
) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)  # type: ignore[attr-defined]
    tensor = torch.zeros(shape).permute(dims)
    assert is_dense(tensor.shape, tensor.stride())
    assert flat_view(tensor).numel() == math.prod(shape)


def test_layouts_differ_by_strides_but_not_by_those_of_single_elements() -> None:
    assert same_layout(torch.zeros(3, 1), torch.zeros(1, 3).t())
    assert not same_layout(torch.zeros(3, 3), torch.zeros(3, 3).t())
    assert not same_layout(torch.zeros(3), torch.zeros(4))
