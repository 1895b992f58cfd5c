"""What a run leaves behind, for other programs too, and the arithmetic that MFU counts."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from graphfsdp.errors import ConfigError
from graphfsdp.training.gpt import GPT, GPTConfig
from graphfsdp.training.metrics import Metrics, flops_per_token, peak_tflops
from graphfsdp.training.run_directory import make_new_directory
from training_helpers import lines_of, train

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
    assert counted == pytest.approx(flops_per_token(model), rel=0.01)


def test_peak_depends_on_gpu_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops("NVIDIA H200", torch.bfloat16) == 989.0
    assert peak_tflops("NVIDIA H100 PCIe", torch.bfloat16) == 756.0
    assert peak_tflops("Unknown GPU", torch.bfloat16) is None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peak_tflops("NVIDIA H200", torch.float32) == 67.0
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_tflops("NVIDIA H200", torch.float32) == 494.0


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
