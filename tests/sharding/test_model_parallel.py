"""Tensor and expert parallelism, sharded on top: 2 x 2 ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import graphfsdp
from graphfsdp import ConfigError
from parallel_models import (
    EP_AXES,
    TP_AXES,
    part_of_axis,
    plain_model,
    tensor_parallel,
    whole_batches,
)
from ranks import on_ranks, rank_device
from sharding_helpers import (
    check_slices,
    hybrid_mesh,
    raises_on_rank,
    units,
)


@on_ranks("ranks4")
def test_norms_count_each_element_once() -> None:
    model = tensor_parallel(sequence=True)
    plain: Any = plain_model("feed").to(rank_device())
    whole = whole_batches()[0]
    mesh = hybrid_mesh((2, 2), TP_AXES)
    plain(*whole).backward()
    model(*part_of_axis(whole, mesh, "dp")).backward()
    for name, param in plain.named_parameters():
        mine: Any = model.get_parameter(name)
        weight = mine.detach().norm().full_tensor()
        assert float(weight) == pytest.approx(float(param.detach().norm()), rel=1e-12)
        if param.grad is not None:
            grad = mine.grad.norm().full_tensor()
            assert float(grad) == pytest.approx(float(param.grad.norm()), rel=1e-9)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert float(graphfsdp.clip_grad_norm_(model, 0.1)) == pytest.approx(float(norm), rel=1e-6)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(
                param.grad.full_tensor(), expected.grad, rtol=1e-6, atol=1e-9
            )
        if "up" in name:
            assert param.placements[0] == Shard(0)
    check_slices(model)


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
    plain = plain_model("feed").to(rank_device())
    torch.manual_seed(3)
    for module in plain.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    set_own(plain)
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole), name


class _OneWeight(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@on_ranks("ranks4")
def test_meshes_and_cuts_that_do_not_fit_are_refused_by_name() -> None:
    mesh = hybrid_mesh((2, 2), TP_AXES)
    other = hybrid_mesh((4,), ("all",))
    tp = mesh["tp"]
    even = distribute_tensor(torch.ones(4, 2), tp, [Shard(0)])
    partial = DTensor.from_local(torch.ones(4, 2), tp, [Partial()])
    elsewhere = "parameter 'weight' lies on the mesh axes ('tp',)", "Remedy: make one mesh"
    refused: list[tuple[DTensor, Any, tuple[str, ...]]] = [
        (even, other, elsewhere),
        (even, None, elsewhere),
        (even, tp, elsewhere),
        (partial, mesh["dp"], ("parameter 'weight' is Partial(sum) on mesh axis 0",)),
    ]
    for weight, over, words in refused:
        with raises_on_rank(ConfigError, *words):
            graphfsdp.fully_shard(_OneWeight(weight), over)
    whole = torch.arange(10.0).view(5, 2)
    for place in (Replicate(), Shard(0), Shard(1)):
        cut = distribute_tensor(whole, tp, [place])
        fine: Any = graphfsdp.fully_shard(_OneWeight(cut), mesh["dp"])
        assert torch.equal(fine.weight.full_tensor(), whole), place


@on_ranks("ranks4")
def test_axes_and_experts_that_do_not_fit_are_refused_by_name() -> None:
    mesh = hybrid_mesh((2, 2), EP_AXES)
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.ones(()))
    linear = nn.Linear(2, 2)
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (linear, {"expert_axis": "experts"}, "the mesh has no axis 'experts'"),
        (
            linear,
            {"expert_axis": "ep", "shard_axis": "ep"},
            "expert_axis 'ep' is an axis to shard over",
        ),
        (
            linear,
            {"expert_axis": "ep", "mesh": mesh["ep"]},
            "the mesh has the expert axis 'ep' alone",
        ),
        (scalar, {"expert_axis": "ep"}, "parameter 'scale' has no dimension"),
    ]
    for module, options, words in refused:
        with raises_on_rank(ConfigError, words):
            graphfsdp.fully_shard(module, **{"mesh": mesh, **options})
    uneven: Any = graphfsdp.fully_shard(
        nn.Linear(2, 2 + mesh.get_local_rank("ep")), mesh, expert_axis="ep"
    )
    with raises_on_rank(ConfigError, "holds another model than rank"):
        uneven.prepare_shards()
