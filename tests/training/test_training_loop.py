"""A whole run through the command line's ``main``: equal bits in every scope, and what is kept."""

import dataclasses
import json
import math
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

import training_helpers
from training_helpers import (
    DROPOUT,
    SMALL,
    TEXT,
    Lines,
    assert_same_run,
    ended,
    lines_of,
    started,
    train,
)

# Clipping, schedule, dropout and several micro-batches, each of which a capture could freeze.
RUN = [*DROPOUT, "--train-iters", "20", "--eval-interval", "6"]


def run(device: torch.device, out: Path, *flags: str) -> Lines:
    assert train(device, *RUN, "--out", str(out), *flags) == 0
    return lines_of(out)


def numbers(lines: Lines) -> list[tuple[float, ...]]:
    return training_helpers.numbers(lines, validated=False)


@pytest.mark.parametrize(
    ("scope", "precision"),
    [
        ("forward_backward", "--bf16"),
        ("full_iteration", "--bf16"),
        ("full_iteration", "--no-bf16"),
    ],
)
def test_a_captured_run_has_the_bits_of_an_eager_one(
    scope: str, precision: str, device: torch.device, tmp_path: Path
) -> None:
    eager = run(device, tmp_path / "eager", precision, "--cuda-graph-scope", "none")
    captured = run(device, tmp_path / "captured", precision, "--cuda-graph-scope", scope)
    assert_same_run(tmp_path / "captured", tmp_path / "eager")
    # The run did what could have been frozen, and was captured.
    assert [line["phase"] for line in captured] == ["warmup"] * 3 + ["capture"] + ["replay"] * 16
    assert {line["phase"] for line in eager} == {"eager"}
    assert sum(line["grad_norm"] > 0.5 for line in eager) > 10
    assert len({line["lr"] for line in eager}) > 15
    assert len({line["loss"] for line in eager}) == 20


def test_dropout_and_the_seed_change_the_numbers(device: torch.device, tmp_path: Path) -> None:
    quick = ["--train-iters", "8", "--eval-interval", "0", "--cuda-graph-scope", "none"]
    reference = numbers(run(device, tmp_path / "reference", *quick))
    assert numbers(run(device, tmp_path / "again", *quick)) == reference
    for flags in (["--seed", "5"], ["--hidden-dropout", "0"], ["--attention-dropout", "0"]):
        assert numbers(run(device, tmp_path / "-".join(flags), *flags, *quick)) != reference


def test_neither_validation_nor_the_log_changes_the_training(
    device: torch.device, tmp_path: Path
) -> None:
    often = run(device, tmp_path / "often", "--eval-interval", "1", "--eval-iters", "3")
    some = run(device, tmp_path / "some", "--eval-interval", "0", "--log-interval", "8")
    assert all("val_loss" in line for line in often)
    assert [line["step"] for line in some if "val_loss" in line] == [20]
    assert [line["step"] for line in some] == [1, 8, 16, 20]
    assert numbers(some) == [entry for entry in numbers(often) if entry[0] in (1, 8, 16, 20)]


def test_validation_loss_is_that_of_the_kept_parameters(
    device: torch.device, tmp_path: Path
) -> None:
    from graphfsdp.data import TokenBatches, load_corpus
    from graphfsdp.training.gpt import GPT, GPTConfig

    lines = run(device, tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]
    shape = {field.name: kept[field.name] for field in dataclasses.fields(GPTConfig)}
    model = GPT(GPTConfig(**shape)).to(device).eval()
    load_model(model, tmp_path / "run" / "model.safetensors", device=str(device))
    batches = TokenBatches(load_corpus(TEXT), seq_length=16, batch_size=4)
    with torch.no_grad():
        losses = [model(*(x.to(device) for x in each)) for each in batches.validation_batches(2, 2)]
    assert torch.stack(losses).double().mean() == lines[-1]["val_loss"]


def test_training_learns_what_comes_next(device: torch.device, tmp_path: Path) -> None:
    """A text in which each byte follows from the one before, though all are equally frequent."""
    text = tmp_path / "text"
    text.write_bytes(bytes((7 * i) % 64 for i in range(20_000)))
    flags = f"--data {text} --train-iters 60 --log-interval 20 --out {tmp_path}/run"
    assert train(device, *flags.split()) == 0
    last = lines_of(tmp_path / "run")[-1]
    assert last["val_loss"] < 0.2 * math.log(64)


def test_the_console_says_what_ran_and_how_it_ended(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(device, tmp_path / "run", "--log-interval", "10")
    shown = capsys.readouterr().out
    for expected in (
        *(torch.__version__, "full_iteration", "num_microbatches   2", "num_parameters"),
        *("torch.float32", "captured step", "kept in"),
        f"step 20/20  loss {lines[-1]['loss']:.4f}",
        f"validation loss {lines[-1]['val_loss']:.4f} nats per token",
    ):
        assert expected in shown
    assert train(device, *RUN, "--train-iters", "8") == 0
    assert "nothing of this run is kept" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_logged(tmp_path: Path) -> None:
    out = tmp_path / "run"
    metrics = out / "metrics.jsonl"
    arguments = ["train", *SMALL, *RUN, "--device", "cpu", "--train-iters", "1000000"]

    def has_lines() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= 8

    with started([*arguments, "--out", str(out)], has_lines) as process:
        said = ended(process, signal.SIGINT)
    assert said == (130, "interrupted; what was logged so far is kept\n")
    lines = lines_of(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads((out / "config.json").read_text())["train_iters"] == 1_000_000
    assert not (out / "model.safetensors").exists()
