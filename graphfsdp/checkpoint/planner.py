"""What torch.distributed.checkpoint asks about our parts: which pieces are saved and read.

Each rank says which box of which tensor it has; rank 0 drops duplicates and checks that the boxes
fill every tensor. One exchange for the whole checkpoint, none per tensor.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from graphfsdp.checkpoint.parts import NamedPart, Part


class PartSavePlanner(DefaultSavePlanner):
    """Plans to save parts of tensors; a part that several ranks have is written once."""

    def __init__(self, parts: Sequence[NamedPart]) -> None:
        """Plan for these parts."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._by_place = _by_place(parts)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Remember who plans for all."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Name every part that holds something; of an empty tensor, the empty part."""
        self.plan = SavePlan(
            [
                _write_item(key, part)
                for key, part in self._parts
                if part.local.numel() or 0 in part.whole_shape
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the elements of a part."""
        return self._by_place[index.fqn, index.offset].local


class PartLoadPlanner(DefaultLoadPlanner):
    """Plans to fill parts with whatever pieces of their tensors were saved."""

    def __init__(self, parts: Sequence[NamedPart]) -> None:
        """Plan for these parts."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._by_place = _by_place(parts)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Remember what was saved."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Name every saved piece that overlaps with a part of this rank."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, part in self._parts:
            if part.local.numel():
                saved = self.metadata.state_dict_metadata[key]
                assert isinstance(saved, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(key, saved, [_chunk(part)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are: each rank reads for itself."""
        return global_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the elements of a part."""
        return self._by_place[index.fqn, index.offset].local


def _by_place(parts: Iterable[NamedPart]) -> dict[tuple[str, torch.Size | None], Part]:
    return {(key, torch.Size(part.offsets)): part for key, part in parts}


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.local.shape)


def _write_item(key: str, part: Part) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(key, torch.Size(part.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(part),
            properties=TensorProperties(dtype=part.dtype),
            size=torch.Size(part.whole_shape),
        ),
    )
