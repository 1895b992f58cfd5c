"""A whole run: equal bits in every scope, and what it leaves behind, for other programs too."""

import dataclasses
import json
import math
import signal
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import training_helpers
from graphfsdp.data import TokenBatches, load_corpus
from graphfsdp.errors import ConfigError
from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.ranks import find_gpu
from graphfsdp.training.run_directory import Metrics, make_new_directory
from training_helpers import (
    DROPOUT,
    SMALL,
    TEXT,
    Lines,
    assert_same_run,
    lines_of,
    started,
    train,
)

METRICS = Metrics(
    step=7,
    loss=float(torch.tensor(1 / 3)),
    lr=0.1 + 0.2,
    grad_norm=1e-30,
    tokens=700,
    tokens_per_s=1234.5678901234567,
    step_ms=math.pi,
    memory_bytes=2**40 + 1,
    phase="replay",
)
CONFIG = GPTConfig(
    vocab_size=100, seq_length=32, num_layers=3, hidden_size=64, num_attention_heads=4
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "step  7/10  loss 0.3333"),
        ({"val_loss": 2.5}, "validation 2.5000"),
        ({"mfu": 0.4}, "MFU 40.0%"),
        ({"loss": math.inf}, "not finite"),
    ],
)
def test_metrics_read_back_bit_for_bit_without_what_was_not_measured(
    changed: dict[str, float], said: str
) -> None:
    metrics = dataclasses.replace(METRICS, **changed)  # type: ignore[arg-type]
    expected = {k: v for k, v in dataclasses.asdict(metrics).items() if v is not None}
    assert json.loads(metrics.to_json()) == expected
    assert ("val_loss" in expected) == ("val_loss" in changed)
    assert said in metrics.describe(10)


@pytest.mark.parametrize(
    ("file", "out", "said"),
    [
        ("metrics.jsonl", "", r"holds another run \(metrics.jsonl\)"),
        ("file", "file", "is not a directory"),
        ("file", "file/run", "cannot be made"),
    ],
)
def test_what_is_in_the_way_is_refused_and_kept(
    file: str, out: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("precious")
    with pytest.raises(ConfigError, match=f"--out .* {said}"):
        make_new_directory(str(tmp_path / out))
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "precious"


@pytest.mark.parametrize("untied", [False, True])
def test_the_formula_agrees_with_counting_matrix_products(untied: bool) -> None:
    config = dataclasses.replace(
        CONFIG, untie_embeddings_and_output_weights=untied, disable_bias_linear=True, swiglu=untied
    )
    model = GPT(config)
    tokens = torch.randint(100, (2, 32))
    # The math kernel is made of plain products, which the counter knows on every device.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    # The formula also counts the norms' weights, which are in no product.
    assert counted == pytest.approx(model.flops_per_token(), rel=0.01)


def test_peak_depends_on_gpu_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, h200 = find_gpu("NVIDIA H100 PCIe"), find_gpu("NVIDIA H200")
    assert h100 is not None
    assert h200 is not None
    assert h200.flops_per_s(torch.bfloat16) == 989e12
    assert h100.flops_per_s(torch.bfloat16) == 756e12
    assert find_gpu("Unknown GPU") is None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert h200.flops_per_s(torch.float32) == 67e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert h200.flops_per_s(torch.float32) == 494e12


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


def test_weights_and_biases_gets_settings_and_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, run = MagicMock(), MagicMock()
    library.init.return_value.__enter__.return_value = run
    monkeypatch.setitem(sys.modules, "wandb", library)
    flags = (*SHORT, "--out", str(tmp_path), "--wandb", "a-project")
    assert train(torch.device("cpu"), *flags) == 0
    (settings,) = [call.kwargs for call in library.init.call_args_list]
    assert settings["project"] == "a-project"
    assert settings["config"]["train_iters"] == 8
    logged = [(call.kwargs["step"], call.args[0]["loss"]) for call in run.log.call_args_list]
    assert logged == [(line["step"], line["loss"]) for line in lines_of(tmp_path)]
    library.init.return_value.__exit__.assert_called_once()


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


@pytest.mark.parametrize("preset", ["tiny", "llama-160m"])
def test_weights_from_the_meta_device_are_drawn_as_a_constructor_draws(
    preset: str, tmp_path: Path
) -> None:
    line = f"--preset {preset} --lr 1e-9 --min-lr 0 --no-bf16 --train-iters 1 --lr-warmup-iters 0"
    # RoPE's tables take a power that the stand-in for a GPU's driver cannot compute.
    run(torch.device("cpu"), tmp_path / "made", *line.split())
    run(torch.device("cpu"), tmp_path / "meta", *line.split(), "--init-model-with-meta-device")
    made, meta = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "meta"))
    for name in made:
        assert meta[name].norm().item() == pytest.approx(made[name].norm().item(), 0.2, 1e-3), name


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
        process.send_signal(signal.SIGINT)
        done = process.ended()
    assert done.returncode == 130
    assert done.stderr == "interrupted; what was logged so far is kept\n"
    lines = lines_of(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads((out / "config.json").read_text())["train_iters"] == 1_000_000
    assert not (out / "model.safetensors").exists()
