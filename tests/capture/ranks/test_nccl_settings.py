"""What is chosen of NCCL's settings where nobody has, and what captured collectives cannot have."""

import logging
import os

import pytest
import torch
import torch.distributed as dist

from graphfsdp import ConfigError
from graphfsdp._capture.ranks import nccl_settings
from graphfsdp._capture.ranks.nccl_settings import prepare_nccl

CUDA = torch.device("cuda", 0)
NAMES = ("NCCL_GRAPH_REGISTER", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


@pytest.fixture(autouse=True)
def _on_hoppers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(nccl_settings, "_has_nccl_ranks", lambda: True)
    monkeypatch.setattr(nccl_settings, "_capability", lambda device: (9, 0))


def test_registration_is_turned_off_once_where_nobody_has_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "graphfsdp")
    prepare_nccl(CUDA)
    prepare_nccl(CUDA)
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    assert [r.getMessage().split()[0] for r in caplog.records] == ["NCCL_GRAPH_REGISTER=0"]


def test_who_has_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    prepare_nccl(CUDA)
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_is_known_to_hang_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    with pytest.raises(ConfigError, match=r"expandable_segments:True on compute capability 9\.0"):
        prepare_nccl(CUDA)
    monkeypatch.setattr(nccl_settings, "_capability", lambda device: (10, 0))
    prepare_nccl(CUDA)
    monkeypatch.setattr(nccl_settings, "_capability", lambda device: (9, 0))
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    prepare_nccl(CUDA)


@pytest.mark.parametrize("name", NAMES[1:])
def test_waits_that_ask_on_the_host_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}=1.*Remedy: unset it"):
        prepare_nccl(CUDA)
    monkeypatch.setenv(name, "0")
    prepare_nccl(CUDA)


def test_one_rank_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_settings, "_has_nccl_ranks", lambda: False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    prepare_nccl(CUDA)
    assert "NCCL_GRAPH_REGISTER" not in os.environ
