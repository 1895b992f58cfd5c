"""Quantisation against torchao where it is installed, against arithmetic by hand everywhere."""

import importlib.util
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfsdp.eight_bit.formats import (
    NUMBER,
    from_float8,
    from_mxfp8,
    scales_of,
    to_float8,
    to_mxfp8,
)

torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
TINY = torch.finfo(torch.float32).tiny
KINDS = ("normal", "wide", "zeros", "denormal", "nan", "infinite", "largest", "ties", "powers")
DTYPES = (torch.float32, torch.bfloat16)


def values(kind: str, dtype: torch.dtype) -> Tensor:  # [6, 64]
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(6, 64, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-60, 60, (6, 64), generator=generator).float())
    elif kind == "zeros":
        x[1] = 0.0
        x[2, :32] = -0.0
    elif kind == "denormal":
        x[0] *= TINY / 4
        x[1, 32:] *= TINY * 2
        x[2] *= 1e-36
    elif kind == "nan":
        x[3, 5] = math.nan
    elif kind == "infinite":
        x[2, 40] = -math.inf
    elif kind == "largest":
        x[0, 0] = torch.finfo(dtype).max
        x[1] = x[1].clamp(-1, 1) * 3e38
    elif kind == "ties":
        x = (torch.arange(6 * 64).view(6, 64) % 47 - 23) * 1.0625
    elif kind == "powers":
        x = torch.exp2(torch.arange(-96, 96).repeat(2).view(6, 64).float())
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    """Bit patterns, of numbers with one for all NaNs: their sign comes from the vector unit."""
    patterns = x.contiguous().view(torch.uint8)
    return patterns.masked_fill(x.float().isnan(), 127) if x.dtype == NUMBER else patterns


def same_numbers(left: Tensor, right: Tensor) -> bool:
    """Equal, where NaN is NaN whatever its sign: two ways to compute it may differ there."""
    alike = (left == right) | (left.isnan() & right.isnan())
    return bool(alike.all()) and left.dtype == right.dtype


def rows(x: Tensor) -> Tensor:
    return scales_of(x.abs().amax(-1, keepdim=True), powers_of_two=True)


@torchao
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_float8_is_torchaos(kind: str, dtype: torch.dtype) -> None:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = values(kind, dtype)
    tensorwise = scales_of(x.abs().amax())
    for how, scale in (("TENSORWISE", tensorwise), ("AXISWISE", rows(x))):
        options: dict[str, Any] = {"scaling_granularity": ScalingGranularity[how]}
        if how == "AXISWISE":
            options |= {"axiswise_dim": -1, "round_scales_to_power_of_2": True}
        theirs: Any = hp_tensor_to_float8_dynamic(x, NUMBER, LinearMMConfig(), **options)
        ours = to_float8(x, scale)
        assert same_numbers(theirs._scale, scale)
        assert torch.equal(bits(theirs._data), bits(ours))
        assert same_numbers(
            theirs.to_original_precision().to(dtype), from_float8(ours, scale, dtype)
        )


@torchao
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8_is_torchaos(kind: str, dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    x = values(kind, dtype)
    scale, data = to_mx(x, NUMBER, 32, ScaleCalculationMode.RCEIL)
    numbers, exponents = to_mxfp8(x)
    assert torch.equal(bits(scale), exponents)
    assert torch.equal(bits(data), bits(numbers))
    theirs = to_dtype(data, scale, NUMBER, 32, dtype)
    assert same_numbers(theirs, from_mxfp8(numbers, exponents, dtype))


def test_numbers_are_torchs_and_saturate() -> None:
    x = torch.tensor([3.0, -0.4, 7.25, 60.0, -1e30])
    expected = torch.tensor([192.0, -25.6, 448.0, 448.0, -448.0]).to(NUMBER)
    assert torch.equal(bits(to_float8(x, torch.tensor(64.0))), bits(expected))


@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "denormal", "ties", "powers"])
def test_blocks_have_the_power_of_two_that_their_definition_gives(kind: str) -> None:
    x = values(kind, torch.float32)
    amax = x.view(-1, 32).abs().amax(-1).tolist()
    _, exponents = to_mxfp8(x)
    largest = int(torch.finfo(NUMBER).max)
    for value, exponent in zip(amax, exponents.flatten().tolist(), strict=True):
        exact = Fraction(value)
        smallest = next(e for e in range(-127, 128) if exact <= largest * Fraction(2) ** e)
        assert exponent == smallest + 127


def test_nan_stays_in_what_it_scales() -> None:
    x = values("nan", torch.float32)
    numbers, exponents = to_mxfp8(x)
    assert exponents[3].tolist()[0] == 255
    back = from_mxfp8(numbers, exponents, torch.float32)
    assert back[3, :32].isnan().all()
    assert not back[3, 32:].isnan().any()
    by_rows = from_float8(to_float8(x, rows(x)), rows(x), torch.float32)
    assert by_rows.isnan().any(-1).tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "wide", "ties"])
def test_what_came_back_is_quantised_to_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    """So a layer that quantises a gathered weight again computes with the numbers of the wire."""
    x = values(kind, dtype)
    scale = scales_of(x.abs().amax())
    numbers = to_float8(x, scale)
    back = from_float8(numbers, scale, torch.bfloat16)
    assert torch.equal(bits(to_float8(back, scales_of(back.abs().amax()))), bits(numbers))
    numbers, exponents = to_mxfp8(x)
    again, same = to_mxfp8(from_mxfp8(numbers, exponents, torch.bfloat16))
    back = from_mxfp8(again, same, torch.float32)
    assert torch.equal(back, from_mxfp8(numbers, exponents, torch.float32))
