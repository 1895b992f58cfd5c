"""What TensorBoard and Weights & Biases are given of a run."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from graphfsdp.errors import ConfigError
from graphfsdp.training.arguments import parse_train_arguments
from training_helpers import lines_of, train

SHORT = ("--train-iters", "8", "--lr-warmup-iters", "1")


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_tensorboard_shows_what_the_run_has_logged(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    flags = (*SHORT, "--out", str(tmp_path), "--tensorboard")
    assert train(torch.device("cpu"), *flags) == 0
    events = accumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = lines_of(tmp_path)
    for name in ("loss", "lr", "step_ms", "memory_bytes"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({line["step"]: line[name] for line in lines}, rel=1e-6)
    assert [event.step for event in events.Scalars("val_loss")] == [8]
    assert "phase" not in events.Tags()["scalars"]


class Run:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.logged: dict[int, dict[str, float]] = {}
        self.is_over = False

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged[step] = values

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True


def test_weights_and_biases_gets_settings_and_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []

    def init(**settings: Any) -> Run:
        runs.append(Run(**settings))
        return runs[-1]

    library = types.ModuleType("wandb")
    monkeypatch.setattr(library, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", library)
    flags = (*SHORT, "--out", str(tmp_path), "--wandb", "a-project")
    assert train(torch.device("cpu"), *flags) == 0
    (run,) = runs
    assert run.settings["project"] == "a-project"
    assert run.settings["config"]["train_iters"] == 8
    lines = lines_of(tmp_path)
    assert {step: values["loss"] for step, values in run.logged.items()} == {
        line["step"]: line["loss"] for line in lines
    }
    assert run.is_over


@pytest.mark.parametrize("flags", [("--wandb", "a-project"), ("--tensorboard",)])
def test_a_package_that_is_missing_is_named(
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    assert train(torch.device("cpu"), *SHORT, "--out", str(tmp_path), *flags) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert 'pip install "graphfsdp[tensorboard,wandb]"' in said


def test_tensorboard_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="--tensorboard needs --out DIR"):
        parse_train_arguments(["--tensorboard"])
