"""Merging of neighbouring tensors into flat runs."""

import math

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


def test_neighbours_in_all_columns_become_one_run() -> None:
    params = _slices([4, 6, 2], [0, 0, 0], torch.bfloat16)
    grads = _slices([4, 6, 2], [0, 0, 0], torch.float32)
    (run,) = merge_neighbours(list(zip(params, grads, strict=True)))
    assert run.members == (0, 1, 2)
    assert [tensor.shape for tensor in run.tensors if tensor is not None] == [(12,), (12,)]
    assert [tensor.data_ptr() for tensor in run.tensors if tensor is not None] == [
        params[0].data_ptr(),
        grads[0].data_ptr(),
    ]


def test_a_gap_in_one_column_splits_the_run() -> None:
    params = _slices([4, 6, 2], [0, 0, 0], torch.float32)
    grads = _slices([4, 6, 2], [0, 3, 0], torch.float32)
    runs = merge_neighbours(list(zip(params, grads, strict=True)))
    assert [run.members for run in runs] == [(0, 1), (2,)]


def test_order_is_that_of_memory_and_not_of_the_list() -> None:
    first, second, third = _slices([4, 6, 2], [0, 0, 0], torch.float32)
    (run,) = merge_neighbours([(third,), (first,), (second,)])
    assert run.members == (1, 2, 0)
    assert run.tensors[0] is not None
    assert run.tensors[0].data_ptr() == first.data_ptr()


def test_storages_that_happen_to_touch_are_not_merged() -> None:
    memory = torch.zeros(8)
    left = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4)
    right = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=16)
    assert left.data_ptr() + 16 == right.data_ptr()
    assert len(merge_neighbours([(left,), (right,)])) == 2


def test_another_dtype_in_the_same_storage_is_not_merged() -> None:
    memory = torch.zeros(8)
    left, right = memory[:4], memory.view(torch.int32)[4:]
    assert len(merge_neighbours([(left,), (right,)])) == 2


def test_a_missing_column_is_merged_only_with_a_missing_one() -> None:
    params = _slices([4, 6], [0, 0], torch.float32)
    mains = _slices([4, 6], [0, 0], torch.float32)
    assert len(merge_neighbours([(params[0], None), (params[1], None)])) == 1
    assert len(merge_neighbours([(params[0], None), (params[1], mains[1])])) == 2


def test_empty_tensors_are_skipped_and_do_not_split() -> None:
    first, empty, second = _slices([4, 0, 2], [0, 0, 0], torch.float32)
    (run,) = merge_neighbours([(first,), (empty,), (second,)])
    assert run.members == (0, 2)
    assert merge_neighbours([(empty,)]) == []
    assert merge_neighbours([]) == []


def test_views_share_memory_with_every_member() -> None:
    tensors = _slices([4, 6, 2], [0, 0, 0], torch.float32)
    (run,) = merge_neighbours([(tensor,) for tensor in tensors])
    assert run.tensors[0] is not None
    run.tensors[0].copy_(torch.arange(12.0))
    assert torch.equal(torch.cat(tensors), torch.arange(12.0))


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
