"""Moments in float16 and float8 with scales: how they are stored, in tensor code and kernels."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adam_kernel_cases import (
    BF16,
    FP8,
    FP16,
    FP32,
    MIXED,
    assert_kernel_is_tensor_code,
    assert_same,
    dtype_names,
    interpreted,
    interpreter,  # noqa: F401  (a fixture)
    make_case,
    needs_triton,
    pairwise,
    stored,
)
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import (
    SCALE_BLOCK_NUMEL,
    SMALLEST,
    TOPS,
    Dtypes,
    dequantize,
)

# Rows of less than a block, of blocks exactly, and of some blocks and a rest.
SHAPES = [(3, 33), (2, 768), (2, 300), (0, 64), (9, 256), (2, 2, 100), (1, 1025)]
PAIRS = [
    (first, second)
    for first, second in itertools.product((FP8, FP16, BF16, torch.float32), repeat=2)
    if {FP8, FP16} & {first, second}
]
HALVES = MIXED._replace(main_param=torch.int16)


def in_dtypes(base: Dtypes, pair: tuple[torch.dtype, torch.dtype], amsgrad: bool = False) -> Dtypes:
    largest = pair[1] if amsgrad else None
    return base._replace(exp_avg=pair[0], exp_avg_sq=pair[1], max_exp_avg_sq=largest)


COMBINATIONS = [in_dtypes(base, pair) for base in (FP32, MIXED, HALVES) for pair in PAIRS]


@pytest.mark.parametrize("dtype", TOPS)
@given(
    shape=st.sampled_from([(1, 1), (3, 256), (4, 300), (700,), (2, 3, 100)]),
    size=st.sampled_from([1e-37, 1e-12, 1.0, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_a_stored_moment_is_within_half_a_unit_of_its_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], size: float, seed: int
) -> None:
    moment = size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    codes, scales = stored(moment, dtype, positive=False)
    found = dequantize(codes, scales)
    # Half a unit of the mantissa, or half of the smallest step of the scale; and what the
    # division, the multiplication and the scale round.
    smallest = SMALLEST[dtype] * scales.max().item()
    close = moment.abs() * (torch.finfo(dtype).eps / 2 + 3 * 2.0**-23) + smallest * 0.51
    assert ((found - moment).abs() <= close).all()
    assert torch.equal(found.sign() * (found != 0), moment.sign() * (found != 0))


@pytest.mark.parametrize("dtype", TOPS)
def test_a_second_moment_is_zero_only_where_it_was(dtype: torch.dtype) -> None:
    moment = torch.cat([torch.zeros(10), torch.logspace(-38, 0, 600)])[None]
    found = dequantize(*stored(moment, dtype, positive=True))
    assert torch.equal(found == 0, moment == 0)
    assert dequantize(*stored(moment, dtype, positive=False)).eq(0).sum() > 10


@pytest.mark.parametrize("dtype", TOPS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_block_with_a_nan_or_infinity_is_not_finite_and_its_neighbours_are(
    dtype: torch.dtype, bad: float
) -> None:
    moment = torch.randn(3, 2 * SCALE_BLOCK_NUMEL)
    moment[1, 5] = bad
    found = dequantize(*stored(moment, dtype, positive=False))
    blocks = found.isfinite().view(3, 2, -1)
    assert not blocks[1, 0].any()
    assert blocks.sum() == 5 * SCALE_BLOCK_NUMEL


@interpreted
@pytest.mark.parametrize("dtypes", pairwise(COMBINATIONS), ids=dtype_names)
def test_interpreted_kernel_equals_the_tensor_code_bit_for_bit(dtypes: Dtypes) -> None:
    assert_kernel_is_tensor_code(SHAPES, dtypes, Flags())


@interpreted
@pytest.mark.parametrize("pair", [(FP8, FP16), (FP16, FP8)])
def test_interpreted_kernel_keeps_the_largest_moment_and_skips(
    pair: tuple[torch.dtype, torch.dtype],
) -> None:
    dtypes = in_dtypes(FP32, pair, amsgrad=True)
    found = make_case(SHAPES, dtypes)
    expected = found.clone()
    found.bundles[0].grad[0, 0] = math.nan
    found.launch(dtypes, None, Flags(), torch.tensor(1.0))
    found.bundles[0].grad.copy_(expected.bundles[0].grad)
    assert_same(found, expected)
    found.launch(dtypes, None, Flags(), torch.tensor(0.0))
    expected.update(None, Flags())
    assert_same(found, expected)


@interpreted
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38, 1e-30])
def test_interpreted_kernel_stores_extreme_values_as_the_tensor_code_does(bad: float) -> None:
    dtypes = in_dtypes(FP32, (FP8, FP8))
    found = make_case([(4, 300)], dtypes)
    found.bundles[0].grad[2, 280] = bad
    found.bundles[0].grad[1] *= 1e-25
    expected = found.clone()
    found.launch(dtypes, None, Flags())
    expected.update(None, Flags())
    assert_same(found, expected)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=dtype_names)
def test_kernel_on_the_gpu_equals_the_tensor_code(dtypes: Dtypes) -> None:
    assert_kernel_is_tensor_code([*SHAPES, (300, 1024)], dtypes, Flags(), device="cuda")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("chunk_numel", [400, 1 << 20])
def test_cpu_path_equals_the_tensor_code(
    pair: tuple[torch.dtype, torch.dtype], chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfsdp.optim.fused.step._SMALLEST_CHUNK", chunk_numel)
    dtypes = in_dtypes(MIXED, pair, amsgrad=True)
    found = make_case([shape for shape in SHAPES if shape[0]], dtypes, wild=False)
    expected, before = found.clone(), found.clone()
    scale = torch.tensor(0.37)
    found.update_on_cpu(scale, Flags())
    expected.update(scale, Flags())
    bundles = zip(found.bundles, expected.bundles, before.bundles, strict=True)
    for ours, theirs, start in bundles:
        assert ours.main_param is not None
        assert theirs.main_param is not None
        assert start.main_param is not None
        # A few roundings of the weight and of its step, which is long where a moment is tiny.
        moved = (theirs.main_param - start.main_param).abs()
        close = 1e-5 * (theirs.main_param.abs() + moved) + 1e-6
        assert ((ours.main_param - theirs.main_param).abs() <= close).all()
        for index in (2, 3, 4):
            codes, others = ours[index], theirs[index]
            assert codes is not None
            assert others is not None
            # One rounding may fall to the other side; and what cancels in a new moment.
            smallest = max(SMALLEST.get(codes.dtype, 0), 3e-7 * TOPS.get(codes.dtype, 3))
            torch.testing.assert_close(
                codes.float(), others.float(), rtol=torch.finfo(codes.dtype).eps, atol=smallest
            )
