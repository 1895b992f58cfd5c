"""Merging of neighbouring tensors into flat runs."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphfsdp.optim.fused.flat_runs import merge_neighbours


def _slices(sizes: list[int], gaps: list[int], dtype: torch.dtype) -> list[Tensor]:
    buffer = torch.zeros(sum(sizes) + sum(gaps), dtype=dtype)
    tensors, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        tensors.append(buffer[end : end + size])
        end += size + gap
    return tensors


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


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
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
