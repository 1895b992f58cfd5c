"""Tensor parallelism, sharded on top: 2 x 2 ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import graphfsdp
from parallel_models import (
    TP_AXES,
    part_of_axis,
    plain_model,
    tensor_parallel,
    whole_batches,
)
from ranks import on_ranks, rank_device
from sharding_helpers import (
    hybrid_mesh,
    units,
)


@on_ranks("ranks4")
def test_whole_weights_are_dropped_between_forward_and_backward() -> None:
    """Saved weights are places in the gathered buffer, DTensors too, so that it is freed."""
    model = tensor_parallel(sequence=True)
    mesh = hybrid_mesh((2, 2), TP_AXES)
    gathered: list[StorageWeakRef] = []

    def remember(module: nn.Module, args: Any) -> None:
        for unit in units(module):
            for buffer in unit.group.buffers:
                if buffer.sharded and buffer.full is not None:
                    gathered.append(StorageWeakRef(buffer.full.untyped_storage()))

    for block in model.blocks:
        block.register_forward_pre_hook(remember)
    loss = model(*part_of_axis(whole_batches()[0], mesh, "dp"))
    assert len(gathered) >= 2
    assert all(storage.expired() for storage in gathered)
    loss.backward()


@on_ranks("ranks4")
def test_meta_parameters_get_the_values_of_the_whole_model() -> None:
    """What a whole model's initialisation draws; parameters without one are set by hand."""

    def set_own(module: nn.Module) -> None:
        for name in ("scale", "frozen"):
            if hasattr(module, name):
                nn.init.constant_(getattr(module, name), 0.5)

    model = tensor_parallel(meta=True)
    torch.manual_seed(3 + dist.get_rank())  # the first rank's values count
    graphfsdp.materialize(model, init=set_own)
    plain = plain_model().to(rank_device())
    torch.manual_seed(3)
    for module in plain.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    set_own(plain)
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole), name


@on_ranks("ranks4")
def test_any_whole_cut_of_another_axis_is_sharded() -> None:
    mesh = hybrid_mesh((2, 2), TP_AXES)
    whole = torch.arange(10.0).view(5, 2)
    for place in (Replicate(), Shard(0), Shard(1)):
        layer: Any = nn.Linear(2, 5, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [place]))
        graphfsdp.fully_shard(layer, mesh["dp"])
        assert torch.equal(layer.weight.full_tensor(), whole), place
