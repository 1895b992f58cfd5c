"""``graphfsdp bench --mlperf``: train to a target several times, and score it as MLPerf does."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table

import graphfsdp
from graphfsdp.bench.environment import find_environment
from graphfsdp.bench.record_files import to_json
from graphfsdp.bench.time_to_target import (
    MIN_NUM_RUNS,
    MLPERF_NUM_RUNS,
    RunRecord,
    TimeToTarget,
    run_record,
    score,
)
from graphfsdp.errors import ConfigError
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.build import choose_device
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.mllog import UNVERIFIED, compliance_complaint
from graphfsdp.training.ranks import Ranks
from graphfsdp.training.run_directory import refuse_used_directory

EXIT_NO_SCORE = 1
_EXIT_BAD_INPUT = 2
_TAIL_CHARACTERS = 500
_ABOUT = """\
Train to a target several times, each time in new processes and with another seed, and score the
times as MLPerf does: without the fastest and the slowest, the mean. The clock of a run starts
after model and graph are made and before the data is touched, and stops with the validation that
reaches the target. Each run leaves an MLLOG file that the official compliance checker judges.

All other flags are those of 'graphfsdp train', such as

  graphfsdp bench --mlperf --preset tiny --target-loss 2.6 --out runs/tiny
"""


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input is reported: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; '{self.prog} --help' lists every flag")


def run_mlperf(arguments: Sequence[str], console: Console) -> int:
    """Carry out ``graphfsdp bench --mlperf``.

    Args:
        arguments: What follows ``graphfsdp bench``, ``--mlperf`` included.
        console: Where to print.

    Returns:
        0, or 1 where the runs have no score.

    Raises:
        ConfigError: a flag, or a combination of flags, that cannot work.
        SystemExit: ``--help`` was asked for and printed.
    """
    options, train_flags = _make_parser().parse_known_args(arguments)
    config = _checked(options, train_flags)
    folder = Path(options.out)
    device = choose_device(config.device, Ranks())
    environment = find_environment(
        device, num_threads=torch.get_num_threads(), num_ranks=options.ranks
    )
    console = Console(file=console.file, width=None if console.is_terminal else 120)
    _line(console, f"{config.mllog_benchmark} to a loss of {config.target_loss:g}; {UNVERIFIED}")
    if options.runs < MLPERF_NUM_RUNS:
        _line(console, f"{options.runs} runs; MLPerf asks for {MLPERF_NUM_RUNS}")
    runs: list[RunRecord] = []
    for number in range(options.runs):
        command = _run_command(options.ranks, train_flags, config.seed + number, folder, number)
        runs.append(_run(command, folder, number, config.seed + number, config))
        _line(console, _describe(number, runs[-1]))
    assert config.target_loss is not None
    found = score(
        runs,
        benchmark=config.mllog_benchmark,
        target_loss=config.target_loss,
        verified=UNVERIFIED,
        command=shlex.join(["graphfsdp", "bench", *arguments]),
        environment=environment,
    )
    (folder / "mlperf.json").write_text(to_json(found), encoding="utf-8")
    (folder / "mlperf.md").write_text(_markdown(found), encoding="utf-8")
    _print(found, console)
    _line(console, f"wrote {folder}: mlperf.json, mlperf.md, result_*.txt")
    return EXIT_NO_SCORE if found.score_s is None else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="graphfsdp bench --mlperf",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--mlperf", action="store_true", help="what chose this help")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="new or empty directory for logs and scores"
    )
    parser.add_argument(
        "--runs", type=int, default=MLPERF_NUM_RUNS, metavar="N",
        help="how many runs, with the seeds --seed, --seed + 1, ... (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N",
        help="processes of a run, which torchrun starts on this machine (default: %(default)s)",
    )  # fmt: skip
    return parser


def _checked(options: argparse.Namespace, train_flags: Sequence[str]) -> TrainConfig:
    """Return the run that the flags ask for, and make the directory."""
    for name, minimum in (("runs", MIN_NUM_RUNS), ("ranks", 1)):
        if getattr(options, name) < minimum:
            raise ConfigError(f"--{name} must be at least {minimum}, got {getattr(options, name)}")
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
    if importlib.util.find_spec("mlperf_logging") is None:
        raise ConfigError(
            "--mlperf writes and checks logs with the package mlperf-logging, which is not "
            "installed: pip install mlperf-logging"
        )
    refuse_used_directory(options.out)
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {options.out} cannot be made ({error.strerror or error}); give a directory "
            "that can"
        ) from None
    return config


def _run_command(
    num_ranks: int, train_flags: Sequence[str], seed: int, folder: Path, number: int
) -> list[str]:
    own = ["--seed", str(seed), "--mllog", str(folder / f"result_{number}.txt")]
    train = ["-m", "graphfsdp", "train", *train_flags, *own, "--no-progress"]
    train += ["--sample-tokens", "0"]
    if num_ranks == 1:
        return [sys.executable, *train]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, *train]


def _run(
    command: Sequence[str], folder: Path, number: int, seed: int, config: TrainConfig
) -> RunRecord:
    """Train once.

    Raises:
        ConfigError: the trainer refuses its flags or its data, as it would each time.
    """
    log, shown = folder / f"result_{number}.txt", folder / f"result_{number}.out"
    code = _execute(command, shown)
    if code == _EXIT_BAD_INPUT:
        raise ConfigError(_tail(shown).removeprefix("error: "))
    complaint = compliance_complaint(log, config.mllog_benchmark) if log.exists() else "no log"
    failure = "" if code == 0 else f"exit code {code}: {_tail(shown)}"
    return run_record(log, seed=seed, complaint=complaint, failure=failure)


def _execute(command: Sequence[str], shown: Path) -> int:
    """Run a command to its end, keep what it says, and return its exit code."""
    # A checkout that is not installed is found by its runs, wherever they are started.
    root = str(Path(graphfsdp.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (
        shown.open("wb") as sink,
        subprocess.Popen(command, stdout=sink, stderr=sink, env=environment) as process,
    ):
        try:
            return process.wait()
        except BaseException:  # Ctrl-C: the run is told too, and nothing of it may go on
            process.terminate()
            raise


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-_TAIL_CHARACTERS:] if lines else "it said nothing"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _describe(number: int, run: RunRecord) -> str:
    what = f"{run.run_s:.3f} s" if run.converged and run.run_s is not None else run.reason
    return f"run {number}, seed {run.seed}: {what}"


def _columns(run: RunRecord) -> list[str]:
    return [
        run.log,
        str(run.seed),
        "-" if run.run_s is None else f"{run.run_s:.3f}",
        "-" if run.init_s is None else f"{run.init_s:.3f}",
        f"{run.num_samples:,}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "yes" if run.converged else "no",
        "accepted" if run.accepted else "refused",
    ]


_HEADINGS = ("log", "seed", "s to target", "s of init", "samples", "loss", "reached", "checker")


def _print(found: TimeToTarget, console: Console) -> None:
    table = Table(title=f"{found.benchmark}, target loss {found.target_loss:g}")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "log" else "right")
    for run in found.runs:
        table.add_row(*_columns(run))
    console.print(table)
    _line(console, _score_line(found))


def _score_line(found: TimeToTarget) -> str:
    if found.score_s is None:
        return f"no score: {found.no_score} ({found.verified})"
    num_runs = len(found.runs)
    return (
        f"{found.score_s:.3f} s to the target: mean of {num_runs} runs without the fastest and "
        f"the slowest ({found.verified})"
    )


def _markdown(found: TimeToTarget) -> str:
    rows = [_HEADINGS, ["---"] * len(_HEADINGS), *map(_columns, found.runs)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = "".join(f"\n* {run.log}: {run.reason}" for run in found.runs if run.reason)
    return (
        f"# {found.benchmark} to a loss of {found.target_loss:g}\n\n{_score_line(found)}\n\n"
        f"{table}\n{reasons}\n\n`{found.command}`\n"
    )
