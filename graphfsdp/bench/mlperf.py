"""``graphfsdp bench --mlperf``: train to a target several times, and score it as MLPerf does."""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from graphfsdp.bench.results import Row, find_environment
from graphfsdp.cli import Parser, add_flags, print_line, require
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import TrainConfig, parse_train_arguments
from graphfsdp.training.mllog import (
    RULESET,
    UNVERIFIED,
    compliance_complaint,
    require_mlperf_logging,
)
from graphfsdp.training.ranks import Ranks, choose_device
from graphfsdp.training.run_directory import make_new_directory

KIND = "graphfsdp_bench_mlperf"
# MLPerf asks for so many runs of its smaller language models.
MLPERF_NUM_RUNS = 10
MIN_NUM_RUNS = 3
EXIT_NO_SCORE = 1
_EXIT_BAD_INPUT = 2
_MAX_CHARACTERS = 500  # of a reason
_ABOUT = """\
Train to a target several times, each time in new processes and with another seed, and score the
times as MLPerf does: without the fastest and the slowest, the mean. The clock of a run starts
after model and graph are made and before the data is touched, and stops with the validation that
reaches the target. Each run leaves an MLLOG file that the official compliance checker judges.

All other flags are those of 'graphfsdp train', such as

  graphfsdp bench --mlperf --preset tiny --target-loss 2.6 --out runs/tiny
"""


@dataclass(frozen=True)
class _Options:
    """Each field is a flag (``cli.add_flags``)."""

    out: Annotated[str, "new or empty directory for logs and scores", "DIR"]
    mlperf: Annotated[bool, "what chose this help", "store_true"] = False
    runs: Annotated[int, "how many runs, with the seeds --seed, --seed + 1, ..."] = MLPERF_NUM_RUNS
    ranks: Annotated[int, "processes of a run, which torchrun starts on this machine"] = 1

    def __post_init__(self) -> None:
        require("runs", self.runs, self.runs >= MIN_NUM_RUNS, f"at least {MIN_NUM_RUNS}")
        require("ranks", self.ranks, self.ranks >= 1, "at least 1")


def run_record(path: Path, *, seed: int, complaint: str, failure: str = "") -> Row:
    """Return what the log of one run says; it may be missing where the run failed early.

    ``run_s`` is None for a run that has missed the target. ``complaint`` is what the compliance
    checker says against it, empty if it accepts it.
    """
    from mlperf_logging.compliance_checker import mlp_parser

    # A line that was cut off, as a crash may leave one, is no line.
    found = mlp_parser.parse_file(str(path), ruleset=RULESET)[0] if path.exists() else ()
    lines: dict[str, Any] = {line.key: line for line in found}  # the last one of each key
    start, stop, loss = (lines.get(key) for key in ("run_start", "run_stop", "eval_accuracy"))
    run_s, reason = None, failure or "the target was not reached"
    if start and stop and not failure and stop.value["metadata"].get("status") == "success":
        run_s = float(stop.timestamp - start.timestamp) / 1e3
        reason = complaint and f"the compliance checker: {complaint}"
    return {
        "log": path.name,
        "seed": seed,
        "run_s": run_s,
        # JSON knows no NaN.
        "loss": loss.value["value"] if loss and math.isfinite(loss.value["value"]) else None,
        "reason": reason,
    }


def score(runs: Sequence[Row]) -> tuple[float | None, str]:
    """Return the seconds, or why there are none.

    They are the mean without the fastest and the slowest run; one that missed the target is the
    slowest. Source: MLPerf training rules, section on scoring.
    """
    converged = [run for run in runs if run["run_s"] is not None]
    refused = [run["log"] for run in converged if run["reason"]]
    if refused:
        return None, f"the compliance checker does not accept {', '.join(refused)}"
    reached = sorted(run["run_s"] for run in converged)
    num_missed = len(runs) - len(reached)
    if num_missed > 1:
        return None, (
            f"{num_missed} of {len(runs)} runs did not reach the target; one may be dropped as "
            "the slowest"
        )
    return statistics.fmean(reached[1:] if num_missed else reached[1:-1]), ""


def run_mlperf(arguments: Sequence[str], console: Console) -> int:
    """Return 1 where the runs have no score."""
    parser = Parser("graphfsdp bench --mlperf", description=_ABOUT)
    add_flags(parser, _Options, {})
    parsed, train_flags = parser.parse_known_args(arguments)
    options = _Options(**vars(parsed))
    config = _checked(train_flags)
    folder = make_new_directory(options.out)
    benchmark, target = config.mllog_benchmark, config.target_loss
    assert target is not None
    print_line(console, f"{benchmark} to a loss of {target:g}; {UNVERIFIED}")
    if options.runs < MLPERF_NUM_RUNS:
        print_line(console, f"{options.runs} runs; MLPerf asks for {MLPERF_NUM_RUNS}")
    environment = find_environment(choose_device(config.device, Ranks()), num_ranks=options.ranks)
    runs = []
    for number in range(options.runs):
        seed, log = config.seed + number, folder / f"result_{number}.txt"
        run = _run(_run_command(options.ranks, train_flags, seed, log), log, seed, config)
        runs.append(run)
        what = run["reason"]
        if run["run_s"] is not None:
            what = f"{run['run_s']:.3f} s to a loss of {run['loss']:.4f}{what and f'; {what}'}"
        print_line(console, f"run {number}, seed {seed}: {what}")
    score_s, no_score = score(runs)
    found = {
        "kind": KIND,
        "benchmark": benchmark,
        "target_loss": target,
        "runs": runs,
        "score_s": score_s,
        "no_score": no_score,
        "verified": UNVERIFIED,
        "command": shlex.join(["graphfsdp", "bench", *arguments]),
        "environment": environment,
    }
    (folder / "mlperf.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    line = f"no score: {no_score}"
    if score_s is not None:
        line = f"{score_s:.3f} s to the target: mean of {len(runs)} runs without the fastest and "
        line += "the slowest"
    print_line(console, f"{line} ({UNVERIFIED})")
    print_line(console, f"wrote {folder}: mlperf.json, result_*.txt")
    return EXIT_NO_SCORE if score_s is None else 0


def _checked(train_flags: Sequence[str]) -> TrainConfig:
    if "RANK" in os.environ:
        raise ConfigError(
            "--mlperf starts the ranks of its runs itself; start it once, without torchrun, and "
            "give --ranks N"
        )
    config = parse_train_arguments(train_flags)
    if config.target_loss is None:
        raise ConfigError(
            "--mlperf measures the time to a target; say with --target-loss which validation "
            "loss it is"
        )
    for flag in ("mllog", "save", "load"):
        if getattr(config, flag) is not None:
            raise ConfigError(
                f"--{flag} is of one run, and --mlperf makes several, whose logs are kept in "
                f"--out; leave --{flag} out"
            )
    require_mlperf_logging("--mlperf")
    return config


def _run_command(num_ranks: int, train_flags: Sequence[str], seed: int, log: Path) -> list[str]:
    own = ["--seed", str(seed), "--mllog", str(log)]
    train = ["-m", "graphfsdp", "train", *train_flags, *own]
    if num_ranks == 1:
        return [sys.executable, *train]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, *train]


def run_program(command: Sequence[str]) -> tuple[int, str]:
    """Return its exit code, and all that it has written."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout


def _run(command: Sequence[str], log: Path, seed: int, config: TrainConfig) -> Row:
    """Raises ConfigError where the trainer refuses its flags or data, as it would each time."""
    code, said = run_program(command)
    log.with_suffix(".out").write_text(said, encoding="utf-8")
    last = (said.strip().splitlines() or ["no message"])[-1][-_MAX_CHARACTERS:]
    if code == _EXIT_BAD_INPUT:
        raise ConfigError(last.removeprefix("error: "))
    complaint = compliance_complaint(log, config.mllog_benchmark) if log.exists() else "no log"
    failure = "" if code == 0 else f"exit code {code}: {last}"
    return run_record(log, seed=seed, complaint=complaint, failure=failure)
