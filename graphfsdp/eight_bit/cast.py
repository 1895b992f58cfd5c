"""Weights of a model cast to 8 bits for their gather, all of one dtype by one kernel.

A weight, or what one rank holds of it, is a stretch of rows [R, K]. Float8: its numbers take K
bytes a row, and a row has one scale; a weight with one scale counts as one row. MXFP8: behind the
K numbers of a row follow its K / 32 scales, so that a gather leaves each weight where it is used,
with rows of 33 K / 32 bytes.

On CUDA a Triton kernel reads addresses from a table, so that the number of launches does not grow
with the number of weights: one for the largest magnitudes, one for the cast; rows that are on no
16-byte border take a second one of each. Tensor code says what the numbers are, on a CPU and where
Triton is not installed.

Shapes: A = scales of all weights.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.eight_bit.formats import to_float8, to_mxfp8

BLOCK_NUMEL = 1024  # values of one program, 8 for each of 128 threads
NUM_WARPS = 4
STRETCH_COLUMNS = ("source", "target", "length", "first_scale", "first_program")
_FLOAT8_BORDER, _MXFP8_BORDER = 16, 4  # bytes; rows of MXFP8 end in between


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
