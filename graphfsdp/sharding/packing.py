"""Weights that are gathered as 8-bit numbers: quantised once an iteration, each rank its rows.

A unit's buffer of such weights has a persistent shard of bytes beside its main weights, which the
all-gather sends; what arrives is turned into weights of the compute dtype, in the unit's gathered
buffer, so that modules, saved weights and gradients know nothing of it. Where a buffer's layers all
multiply in 8 bits (``stays_packed``), its weights are ``EightBitWeight``s over what has arrived.

Float8: the magnitudes of all weights of the model go through one all-reduce, so that each weight,
or each of its rows, has one scale however ranks have cut it. MXFP8: a scale belongs to 32 values
of a row, which no border cuts, and travels behind the shard's numbers in the same bytes.

Shapes: S = elements of a rank's main weights, R = ranks, B = R * S; a shard's bytes are P = S for
float8, S + S / 32 for MXFP8. A = scales of all weights.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.config import GatherFormat
from graphfsdp.eight_bit.formats import (
    BLOCK,
    NUMBER,
    from_float8,
    from_mxfp8,
    scales_of,
    to_float8,
    to_mxfp8,
)
from graphfsdp.eight_bit.weight import EightBitWeight
from graphfsdp.sharding.layout import LocalRows, Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.plan import BufferPlan

_Kind = tuple[GatherFormat, tuple[dist.ProcessGroup, ...]]


class Packing:
    """The 8-bit side of one buffer.

    ``packed``: [P] this rank's bytes. ``scales``: [A of this buffer] for float8, a part of the
    model's. ``moment`` tells when the main weights were written last.
    """

    def __init__(self, plan: BufferPlan, mesh: UnitMesh, moment: Callable[[], int]) -> None:
        assert plan.gather_format is not None
        self._plan = plan
        self.num_scales = plan.num_scales
        self.layout = plan.layout
        self.format = plan.gather_format
        self.moment = moment
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
        self.packed = main.new_zeros(self.layout.packed_numel(self.format), dtype=torch.uint8)
        self.together.forget_memory()

    @property
    def is_old(self) -> bool:
        return self.together.is_old(self)

    def refresh(self) -> None:
        """Quantise, unless that was done in this iteration and nobody has written since."""
        if self.is_old:
            self.together.refresh()

    def amax(self) -> list[Tensor]:
        """Return for each scale the largest magnitude that this rank holds, 0 where none.

        Capture: two operators a weight, one more where this rank holds not all of its rows.
        """
        found = []
        for slot, rows, local in self._local():
            if self.format is GatherFormat.FLOAT8:
                empty = not local.numel()
                found.append(local.new_zeros(1) if empty else local.abs().amax().view(1))
                continue
            after = slot.num_rows - rows.first_row - rows.num_rows
            parts = [local.abs().amax(1)] if local.numel() else []
            if rows.first_row:
                parts.insert(0, local.new_zeros(rows.first_row))
            if after:
                parts.append(local.new_zeros(after))
            found += parts
        return [part.to(torch.float32) for part in found]

    @torch.no_grad()
    def pack(self) -> None:
        """Quantise this rank's weights. Capture: about five operators a weight."""
        numel = self.main.numel()
        numbers = self.packed[:numel].view(NUMBER)
        if self.format is GatherFormat.MXFP8:
            made, exponents = to_mxfp8(self.main)
            numbers.copy_(made)
            self.packed[numel:].copy_(exponents)
            return
        for (_, rows, local), scale in zip(self._local(), self._scales(), strict=True):
            if scale.dim():
                scale = scale.narrow(0, rows.first_row, rows.num_rows)
            place = numbers.narrow(0, rows.shard_offset, rows.numel).view(local.shape)
            place.copy_(to_float8(local, scale))

    def unpack(self, whole: Tensor, full: Tensor) -> None:
        """Turn [R * P] gathered bytes into [B] weights. Capture: three operators a weight."""
        numel = self.layout.shard_numel
        shards = whole.view(self.layout.num_ranks, -1)
        if self.format is GatherFormat.MXFP8:
            numbers = shards[:, :numel].view(NUMBER)
            weights = from_mxfp8(numbers, shards[:, numel:], self._compute)
            full.view(weights.shape).copy_(weights)
            return
        numbers = whole.view(NUMBER)
        for slot, scale in zip(self.layout.slots, self._scales(), strict=True):
            weight = numbers.narrow(0, slot.offset, slot.numel).view(slot.shape)
            place = full.narrow(0, slot.offset, slot.numel).view(slot.shape)
            place.copy_(from_float8(weight, scale, self._compute))

    def in_order(self, whole: Tensor) -> Tensor:
        """Return gathered bytes with all numbers [B] first, then all exponents [B / 32].

        Capture: two operators for MXFP8, else none.
        """
        if self.format is not GatherFormat.MXFP8:
            return whole
        numel = self.layout.shard_numel
        shards = whole.view(self.layout.num_ranks, -1)
        return torch.cat([shards[:, :numel].flatten(), shards[:, numel:].flatten()])

    def weight(self, full: Tensor, slot: Slot) -> Tensor:
        """Return the weight of a slot, over bytes that are in order."""
        numbers = full.narrow(0, slot.offset, slot.numel).view(NUMBER).view(slot.shape)
        if self.format is GatherFormat.MXFP8:
            start = (self.layout.total_numel * BLOCK + slot.offset) // BLOCK
            scale = full.narrow(0, start, slot.numel // BLOCK).view(slot.num_rows, -1)
        else:
            scales = zip(self.layout.slots, self._scales(), strict=True)
            scale = next(scale for each, scale in scales if each is slot)
        return EightBitWeight(numbers, scale, self.format, self._compute)

    def _scales(self) -> Iterator[Tensor]:
        """Yield a scale for each weight: a number, or one for each row [rows, 1]."""
        start = 0
        for slot in self.layout.slots:
            length = self._plan.num_scales_of(slot)
            scale = self.scales.narrow(0, start, length)
            yield scale[0] if self.format is GatherFormat.FLOAT8 else scale.view(-1, 1)
            start += length

    def _local(self) -> Iterator[tuple[Slot, LocalRows, Tensor]]:
        for slot in self.layout.slots:
            rows = self.layout.local_rows(slot, self._part)
            part = self.main.narrow(0, rows.shard_offset, rows.numel)
            yield slot, rows, part.view(rows.num_rows, *slot.shape[1:])


class PackedWeights:
    """The 8-bit weights of all units under one root, which are quantised together."""

    def __init__(self) -> None:
        self._all: list[Packing] = []
        self._scales: dict[_Kind, Tensor] = {}
        self._packed_at: dict[Packing, int] = {}

    def add(self, packing: Packing) -> None:
        self._all.append(packing)
        packing.together = self
        self.forget_memory()

    def forget_memory(self) -> None:
        self._scales.clear()
        self.forget()

    def forget(self) -> None:
        """Quantise again when weights are gathered next: an optimizer may have stepped."""
        self._packed_at.clear()

    def is_old(self, packing: Packing) -> bool:
        return self._packed_at.get(packing) != packing.moment()

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise all weights. Capture: see Packing; one all-reduce for all float8 weights.

        One for each mesh axis that they are cut over, to be exact, and for each format.
        """
        kinds: dict[_Kind, list[Packing]] = {}
        for packing in self._all:
            if packing.num_scales:
                kinds.setdefault((packing.format, packing.groups), []).append(packing)
        for kind, packings in kinds.items():
            self._rescale(kind, packings)
        for packing in self._all:
            packing.pack()
            self._packed_at[packing] = packing.moment()

    def _rescale(self, kind: "_Kind", packings: list[Packing]) -> None:
        gather_format, groups = kind
        amax = torch.cat([part for packing in packings for part in packing.amax()])
        for group in groups:
            all_reduce_(amax, group, reduction="max")
        if kind not in self._scales:
            self._scales[kind] = torch.zeros_like(amax)
            start = 0
            for packing in packings:
                packing.scales = self._scales[kind].narrow(0, start, packing.num_scales)
                start += packing.num_scales
        by_rows = gather_format is GatherFormat.FLOAT8_ROWWISE
        self._scales[kind].copy_(scales_of(amax, powers_of_two=by_rows))
