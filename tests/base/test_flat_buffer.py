"""One storage and its views: offsets, alignment, strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_stand_in import library
from graphfsdp.base.flat_buffer import FlatBuffer, copy_all, is_dense
from graphfsdp.base.memory_plan import VECTOR_BYTES

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=6), st.sampled_from(DTYPES))
def test_views_lie_apart_aligned_and_inside(
    wanted: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    buffer = FlatBuffer([torch.empty(shape) for shape in wanted], dtype=dtype, device=CPU)
    assert [tuple(view.shape) for view in buffer.views] == wanted
    taken: set[int] = set()
    for view in buffer.views:
        offset = int(view.storage_offset())
        places = set(range(offset, offset + view.numel()))
        assert not places & taken
        taken |= places
        assert offset * dtype.itemsize % VECTOR_BYTES == 0
        assert view.dtype == dtype
        assert view.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
    assert max(taken, default=-1) < buffer.flat.numel()
    padding = buffer.flat.numel() - len(taken)
    assert padding * dtype.itemsize < VECTOR_BYTES * max(len(wanted), 1)
    assert buffer.num_bytes == buffer.flat.numel() * dtype.itemsize


@given(shapes, st.randoms(use_true_random=False), st.sampled_from([1, 2, 0]))
def test_dense_strides_are_kept_and_others_become_contiguous(
    shape: tuple[int, ...], random: object, step: int
) -> None:
    """Permuted; with gaps, or over each other."""
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    permuted = torch.empty(shape).permute(order)
    strides = [step * stride for stride in permuted.stride()]
    places = torch.arange(1000).as_strided(permuted.shape, strides)
    fills = sorted(places.flatten().tolist()) == list(range(places.numel()))
    is_kept = is_dense(places.shape, places.stride())
    assert is_kept == fills or not places.numel()
    (view,) = FlatBuffer([places], dtype=torch.float32, device=CPU).views
    assert view.shape == places.shape
    assert view.stride() == places.stride() if is_kept else view.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not library.is_below(), reason="launches are counted by the stand-in")
def test_small_tensors_are_copied_by_one_kernel_and_large_ones_by_one_each() -> None:
    """With others a large one would take several launches of the kernel for many."""
    numels = (7, 30_000_000, 300, 44_000_000)
    sources = [torch.randn(numel, device="cuda").bfloat16() for numel in numels]
    targets = [torch.zeros(numel, device="cuda") for numel in numels]
    before = library.counts()
    copy_all(targets, sources)
    assert library.counts().since(before).launches == 3
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.float())
