"""What is chosen of NCCL's settings where nobody has, and what captured collectives cannot have."""

import logging
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from graphfsdp import ConfigError
from graphfsdp._capture.cuda import graph
from graphfsdp._capture.cuda.graph import _prepare_nccl as prepare_nccl

CUDA = torch.device("cuda", 0)
NAMES = ("NCCL_GRAPH_REGISTER", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


@pytest.fixture(autouse=True)
def _on_hoppers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(graph, "_has_nccl_ranks", lambda: True)
    monkeypatch.setattr(graph, "_capability", lambda device: (9, 0))


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


def test_one_rank_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_has_nccl_ranks", lambda: False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    prepare_nccl(CUDA)
    assert "NCCL_GRAPH_REGISTER" not in os.environ
