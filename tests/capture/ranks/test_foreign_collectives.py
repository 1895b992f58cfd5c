"""Collectives that others issue inside the iteration; NCCL's settings, chosen or refused."""

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphfsdp
from counting_net import mean_square
from graphfsdp import CaptureError, ConfigError
from graphfsdp._capture.cuda import graph
from graphfsdp._capture.cuda.graph import _prepare_nccl as prepare_nccl
from ranks import on_ranks
from sharding_helpers import Block, raises_on_rank


def all_reduced(model: nn.Module, x: Tensor) -> Tensor:
    loss = mean_square(model, x)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return loss * (1 + total)


def block() -> nn.Module:
    return nn.Sequential(Block(4))


def sharded_by_torch() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = block()
    for module in (*model.children(), model):
        torch_fully_shard(module, mesh=mesh)
    return model


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


@pytest.mark.parametrize(
    ("make", "loss_fn", "words"),
    [
        (block, all_reduced, ("c10d", "is a collective", "Remedy")),
        (sharded_by_torch, mean_square, ("fsdp.all_gather_copy_in", "Remedy")),
    ],
)
@on_ranks("ranks2")
def test_a_foreign_collective_is_refused_by_name(
    make: Callable[[], nn.Module], loss_fn: Any, words: tuple[str, ...]
) -> None:
    torch.manual_seed(dist.get_rank())
    model = make()
    with graphfsdp.capture(model, optim := adamw(model), loss_fn=loss_fn) as step:
        for _ in range(3):
            step(torch.randn(2, 4))
        with raises_on_rank(CaptureError, *words):
            step(torch.randn(2, 4))
    if make is block:  # the other's own state is in the middle of a backward pass
        with graphfsdp.capture(model, optim, loss_fn=loss_fn, scope="none") as step:
            assert step(torch.ones(2, 4)).isfinite()


@on_ranks("ranks2")
def test_a_part_in_torchs_data_parallel_is_refused_before_anything_runs() -> None:
    model = nn.Sequential(DistributedDataParallel(Block(4)))
    words = ("'0' is wrapped in DistributedDataParallel", "strategy='no_shard'", "Remedy")
    with raises_on_rank(ConfigError, *words):
        graphfsdp.capture(model, adamw(model), loss_fn=mean_square)
    with graphfsdp.capture(model, adamw(model), loss_fn=mean_square, scope="none") as step:
        assert step(torch.ones(2, 4)).isfinite()


CUDA = torch.device("cuda", 0)
NAMES = ("NCCL_GRAPH_REGISTER", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


@pytest.fixture
def _on_hoppers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(graph, "_has_nccl_ranks", lambda: True)
    monkeypatch.setattr(graph, "_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("_on_hoppers")
def test_registration_is_turned_off_once_where_nobody_has_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "graphfsdp")
    prepare_nccl(CUDA)
    prepare_nccl(CUDA)
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    assert [r.getMessage().split()[0] for r in caplog.records] == ["NCCL_GRAPH_REGISTER=0"]


SEGMENTS = "max_split_size_mb:512, expandable_segments:True"
HANGS = r"expandable_segments:True on compute capability 9\.0"


@pytest.mark.parametrize(
    ("settings", "capability", "refused"),
    [
        ({"NCCL_GRAPH_REGISTER": "1"}, (9, 0), ""),
        *(
            ({"NCCL_GRAPH_REGISTER": chosen, name: SEGMENTS}, (major, 0), refused)
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            for chosen, major, refused in (("1", 9, HANGS), ("1", 10, ""), ("0", 9, ""))
        ),
        # Waits that ask on the host.
        *(({name: "1"}, (9, 0), f"{name}=1.*Remedy: unset it") for name in NAMES[1:]),
        *(({name: "0"}, (9, 0), "") for name in NAMES[1:]),
    ],
)
@pytest.mark.usefixtures("_on_hoppers")
def test_who_has_chosen_is_left_alone_or_refused(
    settings: dict[str, str],
    capability: tuple[int, int],
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(graph, "_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        prepare_nccl(CUDA)
    assert {name: os.environ[name] for name in settings} == settings


@pytest.mark.usefixtures("_on_hoppers")
def test_one_rank_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_has_nccl_ranks", lambda: False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    prepare_nccl(CUDA)
    assert "NCCL_GRAPH_REGISTER" not in os.environ
