"""Float8 and MXFP8 beside torchao and arithmetic by hand; kernels beside tensor code: all bits."""

import importlib.util
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from graphfsdp.config import GatherFormat
from graphfsdp.eight_bit import cast
from graphfsdp.eight_bit.cast import (
    NUMBER,
    Cast,
    Stretch,
    from_float8,
    from_mxfp8,
    make_tables,
    packed_numel,
    scales_of,
    to_float8,
    to_mxfp8,
)
from triton_helpers import (
    compile_for_sm_90,
    fresh_kernels,
    needs_triton,
    resources,
    use_interpreter,
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
def test_numbers_are_torchaos(kind: str, dtype: torch.dtype) -> None:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

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
    mx, data = to_mx(x, NUMBER, 32, ScaleCalculationMode.RCEIL)
    numbers, exponents = to_mxfp8(x)
    assert torch.equal(bits(mx), exponents)
    assert torch.equal(bits(data), bits(numbers))
    theirs = to_dtype(data, mx, NUMBER, 32, dtype)
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


FORMATS = tuple(GatherFormat)
# Adam keeps main weights in these; float16 and float64 are models' own.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "kernel": (cast.find_amax_by_kernel, cast.pack_by_kernel),
    "tensor code": (cast.find_amax, cast.pack),
    "operators": (torch.ops.graphfsdp.find_amax_, torch.ops.graphfsdp.pack_),
}
UNTOUCHED = 91


class Weights:
    """Weights [R, K] of one dtype and format in a packed shard, apart from each other."""

    def __init__(self, weights: Sequence[Tensor], number_format: GatherFormat, gap: int = 32):
        self.format = number_format
        sizes = [packed_numel(weight.numel(), number_format) for weight in weights]
        self.memory = torch.full((sum(sizes) + gap * (len(sizes) + 1),), UNTOUCHED)
        self.memory = self.memory.to(weights[0].device, torch.uint8)
        self.stretches: list[Stretch] = []
        start, first = gap, 1
        for weight, size in zip(weights, sizes, strict=True):
            rows = weight.view(1, -1) if number_format is GatherFormat.FLOAT8 else weight
            self.stretches.append(
                Stretch(rows, self.memory[start : start + size].view(rows.shape[0], -1), first)
            )
            start += size + gap
            first += rows.shape[0]
        # One more before and one behind, which are nobody's.
        self.amax = torch.full((first + 1,), 0.0, device=weights[0].device)

    def quantise(self, how: str) -> "Weights":
        """By the "kernel" or the "tensor code", or by the "operators" of the device."""
        values, packed, first = (list(column) for column in zip(*self.stretches, strict=True))
        find_amax, pack = FUNCTIONS[how]
        tables = make_tables(self.stretches) if how == "kernel" else []
        if how == "operators":
            tables = Cast(self.stretches)._tables
        scales: Tensor | None = None
        if self.format is not GatherFormat.MXFP8:
            find_amax(self.amax, values, first, tables)
            # On the CPU: a GPU's log2 is not what is tested.
            by_rows = self.format is GatherFormat.FLOAT8_ROWWISE
            scales = scales_of(self.amax.cpu(), powers_of_two=by_rows).to(self.amax.device)
        pack(packed, values, scales, first, tables)
        return self

    def same_as(self, other: "Weights") -> bool:
        """Equal in all bytes, NaNs whatever their sign and payload."""
        found, expected = (each.amax.nan_to_num(-1.0, posinf=-2.0) for each in (self, other))
        if not torch.equal(found, expected):
            return False
        memory = []
        for each in (self, other):
            for stretch in each.stretches:
                numbers = stretch.packed[:, : stretch.values.shape[1]]
                numbers.copy_(bits(numbers.view(NUMBER)))
            memory.append(each.memory)
        return torch.equal(*memory)


def assert_kernel_is_tensor_code(weights: Sequence[Tensor], number_format: GatherFormat) -> None:
    found, expected = (
        Weights(weights, number_format).quantise(how) for how in ("kernel", "tensor code")
    )
    assert found.same_as(expected)
    gaps = found.memory.numel() - sum(stretch.packed.numel() for stretch in found.stretches)
    assert int((found.memory == UNTOUCHED).sum()) >= gaps
    assert bool((found.memory != UNTOUCHED).any())
    assert found.amax[0] == found.amax[-1] == 0


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_interpreter(monkeypatch, cast)
    with np.errstate(all="ignore"):
        yield


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_kernel_is_the_tensor_code_bit_for_bit_whatever_the_values(
    dtype: torch.dtype, number_format: GatherFormat
) -> None:
    assert_kernel_is_tensor_code(
        [values(kind, torch.float32).to(dtype) for kind in KINDS], number_format
    )


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number_format", FORMATS)
def test_kernel_takes_rows_of_any_length_wherever_they_are(number_format: GatherFormat) -> None:
    """Longer than a program, on a border or not, a single one, and few enough for one program."""
    shapes = [(2, 1024), (3, 2080), (2, 1056), (5, 32), (7, 96), (1, 64)]
    if number_format is not GatherFormat.MXFP8:
        shapes += [(3, 1030), (2, 1), (5, 7)]
    for dtype, shift in ((torch.float32, 0), (torch.bfloat16, 1)):
        weights = [
            random((shift + rows * length,), dtype)[shift:].view(rows, length)
            for rows, length in shapes
        ]
        assert_kernel_is_tensor_code(weights, number_format)
        tables = make_tables(Weights(weights, number_format).stretches)
        assert tables[2].shape[0] > 0  # some lie on no border
        assert (tables[0].shape[0] > 0) == (shift == 0)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_numbers_are_rounded_as_torch_rounds_around_every_tie_and_every_number() -> None:
    """All numbers and what is half-way between two, and their neighbours in float32."""
    numbers = torch.arange(128, dtype=torch.uint8).view(NUMBER).float()[:-1]
    ties = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([464.0, 480.0])])
    near = ties.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    sizes = near.clamp(min=0).view(torch.float32).flatten()
    weight = torch.cat([sizes, -sizes]).view(1, -1)
    found, expected = (Weights([weight], GatherFormat.FLOAT8_ROWWISE) for _ in range(2))
    ones, lists = torch.ones(3), [[stretch] for stretch in found.stretches[0]]
    cast.pack_by_kernel(lists[1], lists[0], ones, [1], make_tables(found.stretches))  # type: ignore[arg-type]
    cast.pack([expected.stretches[0].packed], [weight], ones, [1], [])
    assert torch.equal(found.memory, expected.memory)
    assert len(found.stretches[0].packed.unique()) == 2 * 127


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_exponents_are_those_of_torchs_log2_around_every_power_of_two() -> None:
    # In float32 log2 is the next whole number for ratios up to 22 units above a power of two.
    near = torch.tensor([-1, 0, 1, 2, 3, 5, 6, 11, 12, 22, 23], dtype=torch.int32)
    ratios = torch.exp2(torch.arange(-149.0, 120)).view(torch.int32)[:, None] + near
    amax = ratios.clamp(min=0).view(torch.float32) * 448
    weight = torch.zeros(amax.numel(), 32)
    weight[:, 3], weight[:, 30] = amax.flatten(), -amax.flatten() / 3
    weight = weight.view(11, 269 * 32)
    assert_kernel_is_tensor_code([weight], GatherFormat.MXFP8)
    exact = torch.frexp(amax / 448)
    up = exact.exponent - (exact.mantissa == 0.5).to(torch.int32) + 127
    rows = Weights([weight], GatherFormat.MXFP8).quantise("kernel").stretches[0].packed
    found = rows[:, 269 * 32 :].reshape(amax.shape)
    assert bool((found != up.clamp(0, 254)).any())  # so that it matters whose log2 it is


@pytest.mark.gpu
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_on_the_gpu_the_cast_is_that_of_the_cpu(
    dtype: torch.dtype, number_format: GatherFormat
) -> None:
    weights = [values(kind, torch.float32).to(dtype) for kind in KINDS] + [random((3, 4128), dtype)]
    found = Weights([weight.cuda() for weight in weights], number_format).quantise("operators")
    expected = Weights(weights, number_format).quantise("operators")
    kept = Weights(weights, number_format)
    kept.amax.copy_(found.amax)
    kept.memory.copy_(found.memory)
    assert kept.same_as(expected)


@pytest.mark.parametrize("num_weights", [1, 200])
def test_launches_do_not_grow_with_the_number_of_weights(
    num_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number_format in FORMATS:
        kernels = MagicMock()
        monkeypatch.setattr(cast, "_kernels", MagicMock(return_value=kernels))
        weights = [random((4, 2048)) for _ in range(num_weights)]
        Weights(weights, number_format).quantise("kernel")
        is_mxfp8 = number_format is GatherFormat.MXFP8
        for name, is_launched in (
            ("amax_kernel", not is_mxfp8),
            ("float8_kernel", not is_mxfp8),
            ("mxfp8_kernel", is_mxfp8),
        ):
            grids = [call.args[0] for call in getattr(kernels, name).__getitem__.call_args_list]
            assert grids == [(8 * num_weights,)] * is_launched


SIGNATURE = {"stretches_ptr": "*i64", "owners_ptr": "*i32"}
KERNELS: tuple[tuple[str, dict[str, str], int], ...] = (
    ("amax_kernel", {"amax_ptr": "*i32"}, 16),
    ("float8_kernel", {"scales_ptr": "*fp32"}, 16),
    ("mxfp8_kernel", {}, 4),
)


@needs_triton
@pytest.mark.parametrize("on_border", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "arguments", "border"), KERNELS)
def test_kernels_compile_for_sm_90(
    name: str,
    arguments: dict[str, str],
    border: int,
    dtype: torch.dtype,
    on_border: bool,
    tmp_path: Path,
) -> None:
    kernels: ModuleType = fresh_kernels(cast)
    constants = cast.constants(dtype, border if on_border else 1)
    compiled = compile_for_sm_90(
        getattr(kernels, name), {**SIGNATURE, **arguments}, constants, cast.NUM_WARPS
    )
    assert ".target sm_90" in compiled["ptx"]
    assert ".ftz" not in compiled["ptx"]  # denormals are numbers as others
    assert ".approx" not in compiled["ptx"]
    assert "fma" not in compiled["ptx"]
    # Whole accesses where the addresses allow them, and numbers never one by one there.
    assert ("ld.global.v4.b32" in compiled["ptx"]) is on_border
    if name != "amax_kernel":
        whole = "st.global.v2.b32" if border == 16 else "st.global.b32"
        assert (whole in compiled["ptx"]) is on_border
    num_registers, num_stack_bytes = resources(compiled["cubin"], tmp_path)
    # Of 65536, for 40 warps at a time and more, where addresses are known.
    assert num_registers <= 65536 // ((40 if on_border else 32) * 32)
    assert num_stack_bytes == 0
