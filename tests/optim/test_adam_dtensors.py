"""FusedAdam on DTensors: it steps on this rank's part, and its states are DTensors too."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from adam_helpers import assert_equal, copy_weights
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam

pytest.importorskip("torch.distributed.tensor")
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SHAPES = [(6, 4), (5,), (2, 3, 4)]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    if dist.is_initialized():
        pytest.skip("needs to start a process group, but one is running")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def _sharded(mesh: DeviceMesh, params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [Shard(0)]))
        for param in params
    ]


def _set_grads(mesh: DeviceMesh, sharded: list[nn.Parameter], plain: list[nn.Parameter]) -> None:
    for ours, theirs in zip(sharded, plain, strict=True):
        theirs.grad = torch.randn_like(theirs)
        ours.grad = distribute_tensor(theirs.grad.clone(), mesh, [Shard(0)])


def _locals(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().to_local()) for param in params]  # type: ignore[attr-defined]


def test_states_are_dtensors_like_their_parameter(mesh: DeviceMesh) -> None:
    plain = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    sharded = _sharded(mesh, plain)
    optimizer = FusedAdam(sharded)
    _set_grads(mesh, sharded, plain)
    optimizer.step()
    for param in sharded:
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[param][key]
            assert isinstance(state, DTensor)
            assert (state.shape, state.placements) == (param.shape, (Shard(0),))
        assert not isinstance(optimizer.state[param]["step"], DTensor)


def test_a_sharded_state_loads_in_place(mesh: DeviceMesh) -> None:
    plain = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    sharded = _sharded(mesh, plain)
    ours, theirs = FusedAdam(sharded, lr=0.1), FusedAdam(plain, lr=0.1)
    _set_grads(mesh, sharded, plain)
    ours.step()
    theirs.step()
    # Not by deepcopy: torch cannot copy a DTensor whose local part is a slice at an offset.
    saved = ours.state_dict()
    saved["state"] = {
        index: {key: value.clone() for key, value in entries.items()}
        for index, entries in saved["state"].items()
    }
    weights = [param.detach().clone() for param in sharded]
    addresses = [ours.state[param]["exp_avg"].to_local().data_ptr() for param in sharded]
    ours.step()
    copy_weights(weights, sharded)
    ours.load_state_dict(saved)
    assert addresses == [ours.state[p]["exp_avg"].to_local().data_ptr() for p in sharded]
    _set_grads(mesh, sharded, plain)
    ours.step()
    theirs.step()
    assert_equal(_locals(sharded), plain)


def test_scaled_moments_need_a_dtensor_that_is_sharded_by_rows(mesh: DeviceMesh) -> None:
    weight = torch.randn(40, 40)
    by_columns = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))
    with pytest.raises(ConfigError, match=r"'w' is a DTensor with .*expected Shard\(0\)"):
        FusedAdam([("w", by_columns)], exp_avg_dtype=torch.float16)
    (by_rows,) = _sharded(mesh, [nn.Parameter(weight)])
    optimizer = FusedAdam([by_rows], exp_avg_dtype=torch.float16)
    _set_grads(mesh, [by_rows], [nn.Parameter(weight)])
    optimizer.step()
    scale = optimizer.state[by_rows]["exp_avg_scale"]
    assert isinstance(scale, DTensor)
    assert (scale.shape, scale.placements) == ((40, 1), (Shard(0),))
