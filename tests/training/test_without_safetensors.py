"""A machine on which nothing can be installed trains, and keeps what it has trained."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.training.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_run_keeps_its_model_as_torch_saves_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    run = RunDirectory(str(tmp_path / "run"), {})
    run.write_model(model.state_dict())
    run.close()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    other = nn.Linear(3, 2)
    other.load_state_dict(torch.load(tmp_path / "run" / "model.pt"))
    assert torch.equal(other.weight, model.weight)


def test_a_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(graphfsdp.CheckpointError, match="Remedy: pip install safetensors"):
        graphfsdp.save(tmp_path / "saved", nn.Linear(2, 2))
