"""Weights of a model cast to 8 bits for their gather, all of one dtype by one kernel.

A weight, or what one rank holds of it, is a stretch of rows [R, K]. Float8: its numbers take K
bytes a row, and a row has one scale; a weight with one scale counts as one row. MXFP8: behind the
K numbers of a row follow its K / 32 scales, so that a gather leaves each weight where it is used,
with rows of 33 K / 32 bytes.

On CUDA a Triton kernel reads addresses from a table, so that the number of launches does not grow
with the number of weights: one for the largest magnitudes, one for the cast; rows that are on no
16-byte border take a second one of each. Tensor code says what the numbers are, on a CPU and where
Triton is not installed.

Numbers are e4m3, up to 448, bit for bit as torchao makes them, NaN and zeros included.

Float8: one float32 scale for a tensor, or for each row; a number is ``value * scale`` rounded to
nearest even and saturated. The scale is 448 / amax, in float64 and then rounded; of rows it is
rounded down to a power of two, so that scaling and its inverse are exact. An amax of 0 counts as
1e-12. A NaN makes its scale NaN, and so all numbers under it.

MXFP8: one scale for 32 values that follow one another in a row, a power of two in 8 bits (E8M0:
the exponent plus 127; 255 is NaN). It is amax / 448 rounded up to a power of two, so that nothing
saturates (torchao's RCEIL, as NVIDIA's kernels do it).

Shapes: A = scales of all weights.

Sources: torchao 0.18, float8/float8_utils.py (amax_to_scale, to_fp8_saturated) and
prototype/mx_formats/mx_tensor.py (to_mx, to_dtype).
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.config import GatherFormat

NUMBER = torch.float8_e4m3fn
_LARGEST = torch.finfo(NUMBER).max
BLOCK = 32  # values that share a scale in MXFP8
_EXPONENT = torch.float8_e8m0fnu
_SMALLEST_AMAX = 1e-12
_BIAS = 127  # of exponents in float32 and in E8M0
_NAN = 255
_INFINITE = 254  # what amax / 448 comes to where amax is infinite
_FLOAT8_BORDER, _MXFP8_BORDER = 16, 4  # bytes; rows of MXFP8 end in between
BLOCK_NUMEL = 1024  # values of one program, 8 for each of 128 threads
NUM_WARPS = 4
STRETCH_COLUMNS = ("source", "target", "length", "first_scale", "first_program")


def scales_of(amax: Tensor, *, powers_of_two: bool = False) -> Tensor:
    """Return float32 scales for largest magnitudes."""
    amax = amax.to(torch.float64).clamp(min=_SMALLEST_AMAX)
    scale = (_LARGEST / amax).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if powers_of_two else scale


def to_float8(values: Tensor, scale: Tensor) -> Tensor:
    return _saturated(values.to(torch.float32) * scale)


def from_float8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers.to(dtype) / scale).to(dtype)


def to_mxfp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [..., K] and, as uint8, exponents [..., K / 32] for values [..., K]."""
    blocks = values.unflatten(-1, (-1, BLOCK)).to(torch.float32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = _rounded_up(amax / _LARGEST)
    # A block of nothing but zeros and denormals of float32 stays as it is.
    factor = _power_of_two(exponent).reciprocal().masked_fill(exponent == 0, 1.0)
    return _saturated(blocks * factor).flatten(-2), exponent.squeeze(-1)


def from_mxfp8(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    blocks: Tensor = numbers.to(dtype).unflatten(-1, (-1, BLOCK))
    return (blocks * _power_of_two(exponents).to(dtype).unsqueeze(-1)).flatten(-2)


def packed_numel(numel: int, number_format: GatherFormat) -> int:
    """Return the bytes of values that are gathered, with the scales that travel with them."""
    return numel + numel // BLOCK if number_format is GatherFormat.MXFP8 else numel


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return float32, exactly, 2^-127 included; NaN for 255."""
    return exponents.view(_EXPONENT).to(torch.float32)


def _saturated(scaled: Tensor) -> Tensor:
    return scaled.clamp(-_LARGEST, _LARGEST).to(NUMBER)


def _rounded_up(ratio: Tensor) -> Tensor:
    power = torch.ceil(torch.log2(ratio)).clamp(-_BIAS, _BIAS) + _BIAS
    power = power.masked_fill(ratio.isinf(), _INFINITE).masked_fill(ratio.isnan(), _NAN)
    return power.to(torch.uint8)


class Stretch(NamedTuple):
    """Rows of one weight, and where they go."""

    values: Tensor  # [R, K] of main weights
    packed: Tensor  # [R, K] uint8, or for MXFP8 [R, 33 K / 32]
    first_scale: int  # of its first row among all; MXFP8 has none there

    @property
    def border(self) -> int:
        border = _FLOAT8_BORDER if self.values.shape == self.packed.shape else _MXFP8_BORDER
        sources = self.values.data_ptr(), self.values.shape[1]
        targets = self.packed.data_ptr(), self.packed.shape[1]
        fits = not any(n % 16 for n in sources) and not any(n % border for n in targets)
        return border if fits else 1


class Cast:
    """Some stretches of weights of one dtype and format, and the kernel's table of them.

    Stale when the memory moves. Capture: made in warm-up, since the table is copied from the host.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._values = [stretch.values for stretch in stretches]
        self._packed = [stretch.packed for stretch in stretches]
        self._first = [stretch.first_scale for stretch in stretches]
        by_kernel = self._values[0].is_cuda and _has_triton()
        self._tables = make_tables(stretches) if by_kernel else []

    def find_amax(self, amax: Tensor) -> None:
        """Write the largest magnitudes into [A] float32, zero before. Capture: one node."""
        torch.ops.graphfsdp.find_amax_(amax, self._values, self._first, self._tables)

    def run(self, scales: Tensor | None) -> None:
        """Cast with [A] float32 scales; None: to MXFP8. Capture: one node."""
        torch.ops.graphfsdp.pack_(self._packed, self._values, scales, self._first, self._tables)


def make_tables(stretches: Sequence[Stretch]) -> list[Tensor]:
    """Return on the device [T, 5] int64 stretches on a border, [P] int32 owners, and the others."""
    tables = []
    for on_border in (True, False):
        chosen = [each for each in stretches if (each.border > 1) is on_border]
        rows = [
            (each.values.data_ptr(), each.packed.data_ptr(), each.values.shape[1], each.first_scale)
            for each in chosen
        ]
        counts = [each.values.shape[0] * -(-each.values.shape[1] // BLOCK_NUMEL) for each in chosen]
        programs = torch.tensor(counts, dtype=torch.int64, device="cpu")
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4)
        table = torch.cat([table, (programs.cumsum(0) - programs).view(-1, 1)], 1)
        owners = torch.arange(len(chosen), dtype=torch.int32, device="cpu")
        tables += [table, owners.repeat_interleave(programs)]
    return [table.to(stretches[0].values.device) for table in tables]


def find_amax(
    amax: Tensor, values: Sequence[Tensor], first: Sequence[int], _tables: Sequence[Tensor]
) -> None:
    """Find them in tensor code."""
    for rows, start in zip(values, first, strict=True):
        amax.narrow(0, start, rows.shape[0]).copy_(rows.abs().amax(1))


def pack(
    packed: Sequence[Tensor],
    values: Sequence[Tensor],
    scales: Tensor | None,
    first: Sequence[int],
    _tables: Sequence[Tensor],
) -> None:
    """Cast in tensor code."""
    for place, rows, start in zip(packed, values, first, strict=True):
        if scales is None:
            numbers, exponents = to_mxfp8(rows)
            torch.cat([numbers.view(torch.uint8), exponents], 1, out=place)
        else:
            scale = scales.narrow(0, start, rows.shape[0]).view(-1, 1)
            place.copy_(to_float8(rows, scale).view(torch.uint8))


def find_amax_by_kernel(
    amax: Tensor, values: Sequence[Tensor], first: Sequence[int], tables: Sequence[Tensor]
) -> None:
    if not tables:
        return find_amax(amax, values, first, tables)
    border = _FLOAT8_BORDER
    return _launch("amax_kernel", tables, values, border, amax.view(torch.int32))


def pack_by_kernel(
    packed: Sequence[Tensor],
    values: Sequence[Tensor],
    scales: Tensor | None,
    first: Sequence[int],
    tables: Sequence[Tensor],
) -> None:
    if not tables:
        return pack(packed, values, scales, first, tables)
    if scales is None:
        return _launch("mxfp8_kernel", tables, values, _MXFP8_BORDER)
    return _launch("float8_kernel", tables, values, _FLOAT8_BORDER, scales)


def _launch(
    name: str, tables: Sequence[Tensor], values: Sequence[Tensor], border: int, *numbers: Tensor
) -> None:
    """Capture: no host sync, no copy from the host; the tables must stay."""
    kernel = getattr(_kernels(), name)
    with torch.cuda.device_of(tables[0]):
        for start, known_border in (0, border), (2, 1):
            owners = tables[start + 1]
            if owners.numel():
                kernel[(owners.numel(),)](
                    tables[start],
                    owners,
                    *numbers,
                    **constants(values[0].dtype, known_border),
                    num_warps=NUM_WARPS,
                    enable_fp_fusion=False,
                )


def constants(dtype: torch.dtype, border: int) -> dict[str, Any]:
    # bfloat16 is the upper half of a float32.
    name = "int16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    source = getattr(_kernels().tl, name)
    return {"SOURCE_DTYPE": source, "BORDER": border, "BLOCK_NUMEL": BLOCK_NUMEL}


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    # Late, so that importing graphfsdp needs no Triton.
    from graphfsdp.eight_bit import triton_kernels

    return triton_kernels


def _nothing(*_args: Any) -> None:
    """Do nothing: on the meta device there are no numbers."""


_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")  # a registration lives as long as it
_LIBRARY.define("find_amax_(Tensor(a!) amax, Tensor[] values, int[] first, Tensor[] tables) -> ()")
_LIBRARY.define(
    "pack_(Tensor(a!)[] packed, Tensor[] values, Tensor? scales, int[] first, Tensor[] tables) "
    "-> ()"
)
for _name, _on_cpu, _on_cuda in (
    ("find_amax_", find_amax, find_amax_by_kernel),
    ("pack_", pack, pack_by_kernel),
):
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    _LIBRARY.impl(_name, _nothing, "Meta")
