"""Weights that are gathered as 8-bit numbers: quantised once an iteration, each rank its rows.

A unit's buffer of such weights has a persistent shard of bytes beside its main weights, which the
all-gather sends; what arrives is turned into weights of the compute dtype, in the unit's gathered
buffer, so that modules, saved weights and gradients know nothing of it.

Float8: the magnitudes of all weights of the model go through one all-reduce, so that each weight,
or each of its rows, has one scale however ranks have cut it. MXFP8: a scale belongs to 32 values
of a row, which no border cuts, and travels behind the numbers of its row in the same bytes.

Shapes: S = elements of a rank's main weights, R = ranks, B = R * S; a shard's bytes are P = S for
float8, S + S / 32 for MXFP8. A = scales of all weights.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.config import GatherFormat
from graphfsdp.eight_bit.cast import (
    NUMBER,
    Cast,
    Stretch,
    from_float8,
    from_mxfp8,
    packed_numel,
    scales_of,
)
from graphfsdp.sharding.layout import BufferPlan, Slot
from graphfsdp.sharding.mesh import UnitMesh


class Packing:
    """The 8-bit side of one buffer.

    ``packed``: [P] this rank's bytes. ``scales``: [A of this buffer] for float8, a part of the
    model's. ``moment`` tells when the main weights were written last, ``packed_at`` of when those
    are that were quantised in this iteration.
    """

    def __init__(self, plan: BufferPlan, mesh: UnitMesh, moment: Callable[[], int]) -> None:
        assert plan.gather_format is not None
        self._plan = plan
        self.layout = plan.layout
        self.num_scales = 0
        self._first_scales: dict[int, int] = {}  # of each slot's weight, by its index
        for slot in self.layout.slots:
            self._first_scales[slot.index] = self.num_scales
            self.num_scales += plan.num_scales_of(slot)
        self.format = plan.gather_format
        self.moment = moment
        self.packed_at: int | None = None
        self.together = PackedWeights()
        self.together.add(self)
        self.groups: tuple[dist.ProcessGroup, ...] = mesh.cut_groups if plan.sharded else ()
        self._part = mesh.part if plan.sharded else 0
        self._compute = plan.dtypes.compute
        self.main = torch.empty(0, device="cpu")
        self.packed = torch.empty(0, device="cpu")
        self.scales = torch.empty(0, device="cpu")

    def move(self, main: Tensor) -> None:
        """Go on with main weights in other memory."""
        self.main = main
        self.packed = main.new_zeros(packed_numel(main.numel(), self.format), dtype=torch.uint8)
        self.together.forget_memory()

    @property
    def is_old(self) -> bool:
        return self.packed_at != self.moment()

    def refresh(self) -> None:
        """Quantise, unless that was done in this iteration and nobody has written since."""
        if self.is_old:
            self.together.refresh()

    def unpack(self, whole: Tensor, full: Tensor) -> None:
        """Turn [R * P] gathered bytes into [B] weights.

        Capture: three to five operators a weight.
        """
        for slot in self.layout.slots:
            place = full.narrow(0, slot.offset, slot.numel).view(slot.shape)
            place.copy_(self._weight(whole, slot))

    def _weight(self, whole: Tensor, slot: Slot) -> Tensor:
        """Return what the numbers of a slot stand for, of [R * P] gathered bytes."""
        rows, length = self._rows(whole, slot.offset, slot.num_rows, slot.row_numel), slot.row_numel
        numbers = rows[:, :length].view(NUMBER)
        if self.format is GatherFormat.MXFP8:
            return from_mxfp8(numbers, rows[:, length:], self._compute)
        start = self._first_scales[slot.index]
        scale = self.scales.narrow(0, start, self._plan.num_scales_of(slot))
        scale = scale[0] if self.format is GatherFormat.FLOAT8 else scale.view(-1, 1)
        return from_float8(numbers, scale, self._compute)

    def stretches(self, start: int) -> Iterator[Stretch]:
        """Yield what this rank holds, where the scales of its weights begin at ``start``."""
        for slot in self.layout.slots:
            rows = self.layout.local_rows(slot, self._part)
            values = self.main.narrow(0, rows.shard_offset, rows.numel)
            values = values.view(rows.num_rows, slot.row_numel)
            packed = self._rows(self.packed, rows.shard_offset, *values.shape)
            first = start + self._first_scales[slot.index]
            if self.format is GatherFormat.FLOAT8:
                values, packed = values.view(1, -1), packed.view(1, -1)
            elif self.format is GatherFormat.FLOAT8_ROWWISE:
                first += rows.first_row
            if values.numel():
                yield Stretch(values, packed, first)

    def _rows(self, packed: Tensor, offset: int, num_rows: int, length: int) -> Tensor:
        """Return the bytes of rows that begin at an element."""
        start, size = (packed_numel(n, self.format) for n in (offset, length))
        return packed.narrow(0, start, num_rows * size).view(num_rows, size)


class PackedWeights:
    """The 8-bit weights of all units under one root, which are quantised together."""

    def __init__(self) -> None:
        self._all: list[Packing] = []
        self._kinds: list[_Kind] = []

    def add(self, packing: Packing) -> None:
        self._all.append(packing)
        packing.together = self
        self.forget_memory()

    def forget_memory(self) -> None:
        self._kinds.clear()
        self.forget()

    def forget(self) -> None:
        """Quantise again when weights are gathered next: an optimizer may have stepped."""
        for packing in self._all:
            packing.packed_at = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise all weights, those of each format together. Capture: see _Kind."""
        if not self._kinds:
            kinds: dict[tuple[GatherFormat, tuple[dist.ProcessGroup, ...]], list[Packing]] = {}
            for packing in self._all:
                kinds.setdefault((packing.format, packing.groups), []).append(packing)
            with torch.inference_mode(mode=False):  # the scales will be written outside of it, too
                self._kinds = [_Kind(packings) for packings in kinds.values()]
        for kind in self._kinds:
            kind.refresh()
        for packing in self._all:
            packing.packed_at = packing.moment()


class _Kind:
    """Buffers of one format, cut over the same mesh axes."""

    def __init__(self, packings: list[Packing]) -> None:
        self._groups = packings[0].groups
        self._by_rows = packings[0].format is GatherFormat.FLOAT8_ROWWISE
        num_scales = sum(packing.num_scales for packing in packings)
        self._scales = packings[0].main.new_zeros(num_scales, dtype=torch.float32)
        stretches: dict[torch.dtype, list[Stretch]] = {}
        start = 0
        for packing in packings:
            packing.scales = self._scales.narrow(0, start, packing.num_scales)
            stretches.setdefault(packing.main.dtype, []).extend(packing.stretches(start))
            start += packing.num_scales
        # A rank may hold no rows.
        self._casts = [Cast(of_dtype) for of_dtype in stretches.values() if of_dtype]

    def refresh(self) -> None:
        """Quantise. Capture: a cast for each dtype of main weights.

        Float8: before it as many searches for the largest magnitudes, one all-reduce of them for
        each mesh axis that weights are cut over, and up to nine operators for all scales.
        """
        scales = self._scales if self._scales.numel() else None
        if scales is not None:
            amax = torch.zeros_like(scales)
            for cast in self._casts:
                cast.find_amax(amax)
            for group in self._groups:
                all_reduce_(amax, group, reduction="max")
            scales.copy_(scales_of(amax, powers_of_two=self._by_rows))
        for cast in self._casts:
            cast.run(scales)
