"""``--mllog`` and ``bench --mlperf``: what the checker accepts, an honest clock, scores of runs."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import graphfsdp
import training_helpers
from graphfsdp.bench import mlperf
from graphfsdp.bench.mlperf import run_mlperf, run_record, score
from graphfsdp.cli import main
from graphfsdp.data import load_corpus
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.training import loop
from graphfsdp.training.config import TrainConfig, find_preset
from graphfsdp.training.mllog import (
    RULES,
    compliance_complaint,
    open_run_log,
)
from graphfsdp.training.ranks import Ranks
from training_helpers import SMALL, assert_same_run, lines_of

# Dropout, clipping and micro-batches, which a capture on made-up data could disturb.
RUN = ["--num-layers", "1", "--hidden-dropout", "0.2", "--lr-warmup-iters", "4"]
RUN += ["--train-iters", "12", "--eval-interval", "4"]
CPU = torch.device("cpu")

needs_mllog = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_logging") is None, reason="mlperf-logging is not installed"
)


def train(device: torch.device, *flags: str) -> int:
    return training_helpers.train(device, *RUN, *flags)


def events(path: Path) -> list[tuple[str, Any, dict[str, Any]]]:
    """Key, value and metadata of each line."""
    found = []
    for line in path.read_text().splitlines():
        data = json.loads(line.removeprefix(":::MLLOG "))
        found.append((data["key"], data["value"], data["metadata"]))
    return found


def complaints(path: Path, rules: str = str(RULES)) -> str:
    """What the official checker says against a log, warnings too; nothing if it accepts it."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", "6.1.0", quiet=False, werror=True)
    accepted = mlp_compliance.main(str(path), rules, checker)[0]
    found = "\n".join([*checker.overwritable.values(), *checker.not_overwritable])
    assert accepted == (not found)
    return found


@needs_mllog
def test_the_checker_accepts_a_run_whose_numbers_are_those_without_a_log(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, seen_at_first_touch = tmp_path / "new" / "result_0.txt", list[str]()

    def watched(path: str | None, **options: Any) -> Any:
        if log.exists():
            seen_at_first_touch.extend(key for key, _, _ in events(log))
        return load_corpus(path, **options)

    monkeypatch.setattr(loop, "load_corpus", watched)
    assert train(device, "--out", str(tmp_path / "plain")) == 0
    assert train(device, "--out", str(tmp_path / "logged"), "--mllog", str(log)) == 0
    # No data before the clock runs, and the capture has left nothing behind.
    assert seen_at_first_touch[-2:] == ["init_stop", "run_start"]
    logged = lines_of(tmp_path / "logged")
    assert_same_run(tmp_path / "logged", tmp_path / "plain")
    assert {line["phase"] for line in logged} == {"replay"}

    assert compliance_complaint(log, "graphfsdp_gpt") == ""
    moments = [key for key, _, _ in events(log) if key.endswith(("_start", "_stop", "_clear"))]
    block = ["block_start", "block_stop", "eval_start", "eval_stop"]
    assert moments == [
        *("cache_clear", "init_start", "init_stop", "run_start"), *3 * block, "run_stop"
    ]  # fmt: skip
    losses = [value for key, value, _ in events(log) if key == "eval_accuracy"]
    assert losses == [line["val_loss"] for line in logged if "val_loss" in line]
    facts = {key: value for key, value, _ in events(log)}
    assert (facts["global_batch_size"], facts["gradient_accumulation_steps"]) == (4, 2)
    assert (facts["train_samples"], facts["eval_samples"]) == (48, 4)
    assert not facts["cache_clear"]  # nobody has said that it was done
    assert "not verified by MLCommons Association" in facts["note"]


@needs_mllog
@pytest.mark.parametrize(("target", "success"), [("5.4", True), ("0.1", False)])
def test_a_target_ends_the_run_or_is_missed(
    target: str, success: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    flags = ["--save", str(tmp_path / "saved"), "--mllog", str(log), "--target-loss", target]
    assert train(CPU, *flags) == 0
    found = events(log)
    stop = [metadata for key, _, metadata in found if key == "run_stop"]
    losses = [value for key, value, _ in found if key == "eval_accuracy"]
    assert [metadata["status"] for metadata in stop] == ["success" if success else "aborted"]
    assert [loss <= float(target) for loss in losses] == (
        [False] * (len(losses) - 1) + [True] if success else [False] * 3
    )
    done = 4 * len(losses)
    assert stop[0]["samples_count"] == 4 * done
    # What a run keeps at its end is kept at an early end too.
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{done:08d}"]
    assert complaints(log) == ""
    said = "reached" if success else "not reached"
    printed = capsys.readouterr().out
    assert f"target loss {target} {said} after {done} iterations" in printed
    assert "result not verified by MLCommons Association" in printed


def write_made_up_run(config: TrainConfig, losses: list[float]) -> None:
    """Tell a log of a run that no test can train: the settings are real, the losses are not."""
    model = torch.nn.Linear(4, 1)
    optimizer = FusedAdam(model.parameters())
    batch = torch.zeros(2, 4)
    ranks = Ranks(size=16, local_size=8, launched=True)

    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).mean()
        return loss

    began_ms = time.time_ns() // 1_000_000
    with (
        graphfsdp.capture(model, optimizer, loss_fn=loss_fn, example_batch=batch) as step,
        open_run_log(config, ranks, CPU, began_ms=began_ms) as log,
    ):
        log.run_starts(step)
        for number, loss in enumerate(losses):
            log.block_starts()
            log.trained(12288 * (number + 1))
            log.block_stops()
            log.validated(loss)
        log.run_stops(success=config.is_success(losses[-1]))


@needs_mllog
@pytest.mark.parametrize(
    ("changed", "losses", "complaint"),
    [
        ({}, [6.1, 3.4, 3.29], None),
        ({}, [6.1, 3.4], "Failed checks for eval_accuracy"),
        ({"adam_eps": 1e-8}, [3.2], "CHECK for 'opt_adamw_epsilon' failed"),
        ({"train_iters": 1000}, [3.2], "CHECK for 'max_steps' failed"),
    ],
    ids=["as the rules say", "target missed", "epsilon", "steps"],
)
def test_the_checker_judges_closed_llama31_8b(
    changed: dict[str, Any], losses: list[float], complaint: str | None, tmp_path: Path
) -> None:
    log = {"mllog": str(tmp_path / "log")}
    config = dataclasses.replace(find_preset("llama31-8b-mlperf"), **(log | changed))
    write_made_up_run(config, losses)
    said = compliance_complaint(tmp_path / "log", "llama31_8b")
    if complaint is not None:
        assert complaint in said
        return
    assert said == complaints(tmp_path / "log", "training_6.1.0/common.yaml") == ""
    facts = {key: value for key, value, _ in events(tmp_path / "log")}
    assert facts["submission_benchmark"] == "llama31_8b"
    assert (facts["global_batch_size"], facts["gradient_accumulation_steps"]) == (16, 1)
    assert facts["lowest_numerical_precision_in_linear"] == "bfloat16"


@needs_mllog
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"key": "eval_stop"', '"key": "eval_over"', "'eval_stop' but found 0"),
        ('"samples_count": 24576', '"samples_count": 8', "CHECK for 'block_stop' failed"),
        ('"key": "run_start"', '"key": "init_start"', "CHECK for 'block_start' failed"),
        ('"status": "success"', '"status": "fine"', "CHECK for 'run_stop' failed"),
        ('"value": 5.5', '"value": 0.5', "failed test: s['status'] == 'aborted'"),
        ('"key": "seed"', '"key": "seat"', "'seed' but found 0"),
    ],
)
def test_our_rules_refuse_a_log_out_of_order_or_untrue(
    old: str, new: str, complaint: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    write_made_up_run(TrainConfig(mllog=str(log), target_loss=5.5), [6.1, 5.3])
    assert complaints(log) == ""
    text = log.read_text()
    assert old in text
    log.write_text(text.replace(old, new))
    assert complaint in complaints(log)


@needs_mllog
def test_a_failure_after_the_clock_has_started_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[int]()

    def fails_at_the_second(*args: Any, **options: Any) -> float:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        return 4.0

    monkeypatch.setattr(loop, "validation_loss", fails_at_the_second)
    assert train(CPU, "--mllog", str(tmp_path / "log")) == 1
    assert "the disk is gone" in capsys.readouterr().err
    found = events(tmp_path / "log")
    stops = [metadata for key, _, metadata in found if key == "run_stop"]
    assert [(stop["status"], stop["samples_count"]) for stop in stops] == [("aborted", 32)]
    assert found[-1][:2] == ("train_samples", 32)


def test_what_cannot_be_logged_is_refused_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*flags: str) -> str:
        assert train(CPU, *flags) == 2
        return capsys.readouterr().err

    used = tmp_path / "used"
    used.write_text("precious")
    log = ("--mllog", str(tmp_path / "log"))
    if importlib.util.find_spec("mlperf_logging") is not None:
        assert "holds a log already" in refusal("--mllog", str(used))
        assert "is a directory" in refusal("--mllog", str(tmp_path))
        assert "cannot be made" in refusal("--mllog", str(used / "log"))
        assert used.read_text() == "precious"
        said = refusal(*log, "--data", str(tmp_path / "tokens.bin"))
        assert "say with --vocab-size" in said
    assert "--mllog times a run from its" in refusal(*log, "--load", str(tmp_path))
    assert "--target-loss must be greater than 0" in refusal("--target-loss", "0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "graphfsdp[mlperf]"' in refusal("--mllog", str(tmp_path / "new"))


SCORED = [*SMALL, "--train-iters", "60", "--eval-interval", "4", "--device", "cpu"]

TIMES = st.lists(st.floats(0.001, 1e6), min_size=3, max_size=12)


def scored(*times: float | None, accepted: bool = True) -> tuple[float | None, str]:
    return score(
        [
            {"run_s": time, "reason": "" if accepted and time else "why", "log": "a log"}
            for time in times
        ]
    )


@settings(max_examples=30)
@given(TIMES)
def test_the_score_leaves_the_two_ends_out(times: list[float]) -> None:
    inner = sorted(times)[1:-1]
    assert scored(*times) == (statistics.fmean(inner), "")
    # A run that missed the target is the slowest, whatever its clock said.
    assert scored(*times, None) == (statistics.fmean(sorted(times)[1:]), "")


def test_what_has_no_score_says_why() -> None:
    seconds, why = scored(1.0, 2.0, 3.0, None, None)
    assert seconds is None
    assert why.startswith("2 of 5 runs did not reach the target")
    seconds, why = scored(1.0, 2.0, 3.0, accepted=False)
    assert seconds is None
    assert why == "the compliance checker does not accept a log, a log, a log"


def write_log(path: Path, *, status: str | None) -> None:
    def line(time_ms: int, key: str, value: object, **metadata: object) -> str:
        data = {"time_ms": time_ms, "key": key, "value": value, "metadata": metadata}
        return f"rank 0 says :::MLLOG {json.dumps(data)}\n"

    text = "hello\n" + line(4000, "run_start", None) + line(4100, "eval_accuracy", 9.0)
    text += line(9000, "eval_accuracy", 2.5)
    if status is not None:
        text += line(10500, "run_stop", None, status=status)
    path.write_text(text + ':::MLLOG {"key": "cut')


@needs_mllog
@pytest.mark.parametrize(
    ("status", "complaint", "failure", "run_s", "reason"),
    [
        ("success", "", "", 6.5, ""),
        ("success", "bad", "", 6.5, "the compliance checker: bad"),
        # A success that a failure followed, such as a rank that died, is none.
        ("success", "", "exit code 1", None, "exit code 1"),
        ("aborted", "", "", None, "the target was not reached"),
        (None, "x", "exit code 1: boom", None, "exit code 1: boom"),
        ("absent", "no log", "exit code 1", None, "exit code 1"),
    ],
)
def test_a_run_is_what_its_log_says(
    tmp_path: Path,
    status: str | None,
    complaint: str,
    failure: str,
    run_s: float | None,
    reason: str,
) -> None:
    log = tmp_path / "result_0.txt"
    if status != "absent":
        write_log(log, status=status)
    run = run_record(log, seed=3, complaint=complaint, failure=failure)
    assert (run["run_s"], run["reason"]) == (run_s, reason)
    assert run["loss"] == (None if status == "absent" else 2.5)


def run_here(command: Sequence[str], *_: object) -> tuple[int, str]:
    """Do a run in this process: starting one takes longer than what it does."""
    assert command[:4] == [sys.executable, "-m", "graphfsdp", "train"]
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        return main(command[3:]), sink.getvalue()


def run(tmp_path: Path, *flags: str) -> tuple[int, str]:
    with (tmp_path / "shown").open("w") as sink:
        code = run_mlperf(["--mlperf", *SCORED, *flags], Console(file=sink))
    return code, (tmp_path / "shown").read_text()


@needs_mllog
def test_three_runs_have_a_score_and_leave_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlperf, "run_program", run_here)
    out = tmp_path / "out"
    code, shown = run(
        tmp_path, "--runs", "3", "--target-loss", "3.9", "--seed", "7", "--out", str(out)
    )
    assert code == 0, shown
    assert "result not verified by MLCommons Association" in shown
    assert "3 runs; MLPerf asks for 10" in shown
    found = json.loads((out / "mlperf.json").read_text())
    assert [each["seed"] for each in found["runs"]] == [7, 8, 9]
    assert all(each["run_s"] > 0 and not each["reason"] for each in found["runs"])
    assert all(each["loss"] <= 3.9 for each in found["runs"])
    times = [each["run_s"] for each in found["runs"]]
    assert found["score_s"] == pytest.approx(statistics.median(times))
    # Other seeds, other runs.
    assert len({each["loss"] for each in found["runs"]}) == 3
    assert "not verified" in found["verified"]
    for number in range(3):
        assert f'"key": "seed", "value": {7 + number}' in (out / f"result_{number}.txt").read_text()


@needs_mllog
def test_what_the_trainer_refuses_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlperf, "run_program", run_here)
    out, absent = tmp_path / "out", str(tmp_path / "absent")
    with pytest.raises(ConfigError, match=f"^--data {absent}: cannot be read"):
        run(tmp_path, "--data", absent, "--target-loss", "3.9", "--out", str(out))
    assert "cannot be read" in (out / "result_0.out").read_text()
    assert not (out / "result_1.out").exists()


def test_several_ranks_are_started_by_torchrun(tmp_path: Path) -> None:
    command = mlperf._run_command(2, ["--lr", "1"], 5, tmp_path / "result_3.txt")
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert command[6:11] == ["-m", "graphfsdp", "train", "--lr", "1"]
    assert command[11:15] == ["--seed", "5", "--mllog", str(tmp_path / "result_3.txt")]


def test_what_cannot_be_scored_is_refused_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*flags: str) -> str:
        with pytest.raises(ConfigError) as caught:
            run(tmp_path, *flags)
        return str(caught.value)

    out = ("--out", str(tmp_path / "out"))
    target = ("--target-loss", "3.9")
    assert "--out" in refused(*target)
    assert "--runs must be at least 3, got 2" in refused(*target, *out, "--runs", "2")
    assert "--ranks must be at least 1, got 0" in refused(*target, *out, "--ranks", "0")
    assert "say with --target-loss" in refused(*out)
    for flag in ("--mllog", "--save", "--load"):
        assert f"{flag} is of one run" in refused(*target, *out, flag, str(tmp_path / "x"))
    assert "--help' lists every flag" in refused(*target, *out, "--no-such-flag")
    if importlib.util.find_spec("mlperf_logging") is not None:
        assert "cannot be made" in refused(*target, "--out", str(tmp_path / "shown" / "x"))
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as launched:
        launched.setenv("RANK", "0")
        assert "without torchrun" in refused(*target, *out)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "graphfsdp[mlperf]"' in refused(*target, *out)
