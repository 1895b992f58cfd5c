"""Offloaded optimizer state on two ranks: by this rank's rows, captured as eager, checkpoints."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import graphfsdp
from adam_helpers import Net
from graphfsdp.base.dtensors import local_part
from graphfsdp.optim import CPUOffload, FusedAdam
from helpers import quick_garbage_collection
from ranks import RankPool


def make(fraction: float | None, seed: int = 0) -> tuple[nn.Module, FusedAdam | CPUOffload]:
    torch.manual_seed(seed)
    model = Net()
    policy = graphfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    graphfsdp.fully_shard(model.first, mp_policy=policy)
    graphfsdp.fully_shard(model, mp_policy=policy)
    optimizer = FusedAdam(model.parameters(), lr=0.05)
    if fraction is None:
        return model, optimizer
    return model, CPUOffload(optimizer, offload_fraction=fraction)


def locals_of(model: nn.Module) -> list[Tensor]:
    return [local_part(param.detach()).clone() for param in model.parameters()]


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, scope: str, num_steps: int
) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    with graphfsdp.capture(model, optimizer, scope=scope, max_grad_norm=0.5) as step:
        for index in range(num_steps):
            step(torch.randn(5, 6, generator=generator).bfloat16())
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 0.05 / (index + 1), 0.01 * index
            found.append(locals_of(model))
    return found


def train(scope: str, fraction: float | None) -> list[list[Tensor]]:
    quick_garbage_collection()
    model, optimizer = make(fraction)
    found = steps(model, optimizer, scope, 14)
    if fraction:
        assert isinstance(optimizer, CPUOffload)
        assert optimizer.offloaded
        saved = 8 * sum(local_part(param).numel() for param in optimizer.offloaded)
        assert optimizer.saved_bytes == saved
        for param in optimizer.offloaded:
            moment: Any = optimizer.state[param]["exp_avg"]
            assert (moment.shape, moment.placements) == (param.shape, param.placements)  # type: ignore[attr-defined]
    return found


def test_a_captured_step_of_shards_equals_the_eager_one_and_the_one_without_offload(
    ranks2: RankPool,
) -> None:
    expected = ranks2.run(train, "none", None)
    for scope, fraction in (("none", 1.0), ("forward_backward", 0.5), ("forward_backward", 1.0)):
        for theirs, ours in zip(expected, ranks2.run(train, scope, fraction), strict=True):
            for left, right in zip(theirs, ours, strict=True):
                for one, other in zip(left, right, strict=True):
                    assert torch.equal(one, other), (scope, fraction)


def saved_and_loaded(folder: str) -> bool:
    """Save with offload, load without, and the other way round; go on; compare."""
    for index, (saving, loading) in enumerate([(1.0, None), (None, 0.5)]):
        model, optimizer = make(saving)
        steps(model, optimizer, "none", 3)
        graphfsdp.save(Path(folder) / str(index), model, optimizer)
        other, resumed = make(loading, seed=1)
        graphfsdp.load(Path(folder) / str(index), other, resumed)
        expected, found = (
            steps(m, o, "none", 2) for m, o in ((model, optimizer), (other, resumed))
        )
        for left, right in zip(expected[-1], found[-1], strict=True):
            assert torch.equal(left, right)
    return True


def test_a_checkpoint_goes_between_ranks_with_and_without_offload(ranks2: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks2.run(saved_and_loaded, folder))


def step_on_a_mesh_of_another_device() -> list[str]:
    """Parameters of a mesh of GPUs; this machine has none, so that nothing may be copied there."""
    mesh = DeviceMesh("cuda", list(range(dist.get_world_size())), _init_backend=False)
    made = DTensor.from_local(torch.ones(4, 3, device="meta"), mesh, [Shard(0)], run_check=False)
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(4, 3)
    optimizer.step()
    from graphfsdp.base.dtensors import wrap_like, wrap_rows_like

    states: list[Any] = [
        wrap_like(optimizer.state[param]["exp_avg"], made),
        wrap_rows_like(torch.zeros(4, 1), made),
    ]
    assert states[0].to_local().data_ptr() == optimizer.state[param]["exp_avg"].data_ptr()
    return [f"{state.device} {tuple(state.shape)} {state.placements[0].dim}" for state in states]


def test_state_on_the_cpu_of_parameters_on_gpus_is_a_dtensor_too(ranks2: RankPool) -> None:
    size = 2 * 4
    for found in ranks2.run(step_on_a_mesh_of_another_device):
        assert found == [f"cpu ({size}, 3) 0", f"cpu ({size}, 1) 0"]
