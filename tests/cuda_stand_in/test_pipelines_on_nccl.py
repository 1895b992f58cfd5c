"""Pipelines on ranks of NCCL: replays in any order equal eager steps, and failing ranks."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import assert_any_order, chosen
from faults_at_operators import Fault, FaultMode, InjectedError
from graphfsdp import Phase
from helpers import set_lr
from pipeline_models import (
    KINDS,
    adam,
    batch,
    check_failing_rank,
    data_parallel,
    parameters_of,
    schedule_of,
    tensor_parallel,
)
from ranks import RankPool, on_ranks
from sharding_helpers import assert_equal_tensors, learning_rate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library.is_below(), reason="needs the stand-in: make cuda-test"),
]

NUM_STEPS = 6  # three warm-ups and the capture among them


def in_any_order(name: str, inner: str | None) -> str:
    """Compare replays in order with eager steps, those in other orders with them; return races."""
    options: dict[str, Any] = {"dropout": 0.2}
    if inner is not None:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "inner"))
        of_tensors = inner == "tensor"
        cut = tensor_parallel(mesh["inner"]) if of_tensors else data_parallel(mesh["inner"], inner)
        options = {"group": mesh.get_group("pp"), "shard": cut}
    library.take_races()
    runs = []
    for scope in ("none", "full_iteration"):
        schedule = schedule_of(KINDS[name], **options)
        optim = adam(schedule)
        torch.manual_seed(7)
        with graphfsdp.capture(schedule, optim, scope=scope, max_grad_norm=0.5) as step:
            found: dict[str, Tensor] = {}
            for index in range(NUM_STEPS):
                set_lr(optim, learning_rate(index))
                x, target = batch(index)
                found[f"loss {index}"] = step(x, target=target)
                assert step.grad_norm is not None
                found[f"norm {index}"] = step.grad_norm
            for key, param in parameters_of(schedule).items():
                found[key] = getattr(param, "full_tensor", param.detach)().clone()
            runs.append(found)
            if step.phase is Phase.REPLAY:
                assert_any_order(step, seed=1 + dist.get_rank(), num_orders=20)
    assert_equal_tensors(*runs)
    return library.take_races()


@pytest.mark.parametrize("name", KINDS)
def test_two_stages_replay_in_any_order(name: str, gpu_ranks: RankPool) -> None:
    assert gpu_ranks.run(in_any_order, name, None) == [""] * 2


@pytest.mark.parametrize(
    ("name", "inner"), [("1f1b", "optim_grads_params"), ("interleaved", "tensor")]
)
def test_stages_that_are_parallel_in_themselves_replay_in_any_order(
    name: str, inner: str, gpu_ranks4: RankPool
) -> None:
    assert gpu_ranks4.run(in_any_order, name, inner) == [""] * 4


@pytest.mark.parametrize(
    ("name", "index", "num_ops"),
    [("interleaved", 1, 40), ("gpipe", 5, 0)],
    ids=["warm-up", "replay"],
)
def test_a_rank_that_fails_frees_the_others(name: str, index: int, num_ops: int) -> None:
    # Launches of a replay come back at once, as on a GPU: what they have put on streams waits.
    launches = functools.partial(chosen, streams=1) if index > 4 else nullcontext
    check_failing_rank(RankPool(2, "cuda"), name, index, num_ops, launches)


def losses_of_a_run(*, fails: bool) -> list[Tensor]:
    """Train; the last rank may fail in the middle of the capture, which then comes a call later."""
    schedule = schedule_of(KINDS["1f1b"], dropout=0.2)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    losses = []
    torch.manual_seed(7)
    with graphfsdp.capture(schedule, adam(schedule), max_grad_norm=0.5) as step:
        for index in range(NUM_STEPS):
            x, target = batch(index)
            if fails and index == 3:
                fault = FaultMode(90, Fault.ERROR, after=False) if is_last else nullcontext()
                with pytest.raises((InjectedError, graphfsdp.CaptureError)) as caught, fault:
                    step(x, target=target)
                assert is_last or "rank 1 of 2 failed in iteration 4: Inj" in str(caught.value)
            losses.append(step(x, target=target))
        assert step.phase is Phase.REPLAY
    return losses


@on_ranks("gpu_ranks")
def test_ranks_go_on_after_a_capture_that_failed_on_one() -> None:
    assert_equal_tensors(losses_of_a_run(fails=False), losses_of_a_run(fails=True))
