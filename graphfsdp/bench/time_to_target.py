"""Scores in the style of MLPerf: what a log says of its run, and the mean over several runs."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphfsdp.bench.facts import Environment
from graphfsdp.errors import ConfigError

KIND = "graphfsdp_bench_mlperf"
# MLPerf asks for so many runs of its smaller language models.
MLPERF_NUM_RUNS = 10
MIN_NUM_RUNS = 3
_TOKEN = ":::MLLOG "


@dataclass(frozen=True)
class RunRecord:
    """What the log of one run says.

    Attributes:
        log: Name of the file.
        seed: Of weights and batches.
        converged: The run reached its target.
        init_s: Seconds of set-up and capture, before the clock.
        run_s: Seconds on the clock; None for a run that did not end by itself.
        num_samples: Sequences trained on.
        loss: Of the last validation; None without any.
        accepted: The official compliance checker accepts the log.
        reason: Why it did not converge or was not accepted; empty otherwise.
    """

    log: str
    seed: int
    converged: bool
    init_s: float | None
    run_s: float | None
    num_samples: int
    loss: float | None
    accepted: bool
    reason: str = ""


@dataclass(frozen=True)
class TimeToTarget:
    """Several runs to the same target.

    Attributes:
        benchmark: Name that the logs give it.
        score_s: Olympic mean of the seconds to the target; None where it has none.
        no_score: Why there is none; empty otherwise.
        verified: What this is not.
    """

    benchmark: str
    target_loss: float
    runs: tuple[RunRecord, ...]
    score_s: float | None
    no_score: str
    mean_samples: float | None
    verified: str
    command: str
    environment: Environment
    kind: str = KIND


def olympic_mean(run_s: Sequence[float | None]) -> float:
    """Return the mean without the fastest and the slowest run.

    Args:
        run_s: Seconds of each run; None for one that did not reach the target, which counts as
            the slowest.

    Raises:
        ConfigError: there are too few runs, or too many did not reach the target.

    Source: MLPerf training rules, section on scoring.
    """
    if len(run_s) < MIN_NUM_RUNS:
        raise ConfigError(
            f"the mean without fastest and slowest needs at least {MIN_NUM_RUNS} runs, got "
            f"{len(run_s)}"
        )
    reached = sorted(time for time in run_s if time is not None)
    num_missed = len(run_s) - len(reached)
    if num_missed > 1:
        raise ConfigError(
            f"{num_missed} of {len(run_s)} runs did not reach the target; one may be dropped as "
            "the slowest"
        )
    return statistics.fmean(reached[1:] if num_missed else reached[1:-1])


def read_log(path: Path) -> dict[str, tuple[int, object, Mapping[str, object]]]:
    """Return time in milliseconds, value and metadata of the last line of each key.

    A last line that was cut off, as a crash may leave one, is left out.
    """
    found: dict[str, tuple[int, object, Mapping[str, object]]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        _, token, text = line.partition(_TOKEN)
        if not token:
            continue
        try:
            data = json.loads(text)
        except ValueError:
            continue
        found[data["key"]] = data["time_ms"], data["value"], data["metadata"]
    return found


def run_record(path: Path, *, seed: int, complaint: str, failure: str = "") -> RunRecord:
    """Return what a log says.

    Args:
        path: The log; may be missing where the run failed early.
        seed: Of the run.
        complaint: What the compliance checker says against it; empty if it accepts it.
        failure: How the run failed; empty if it did not.
    """
    lines = read_log(path) if path.exists() else {}

    def seconds(start: str, stop: str) -> float | None:
        if start not in lines or stop not in lines:
            return None
        return (lines[stop][0] - lines[start][0]) / 1e3

    status = lines["run_stop"][2].get("status") if "run_stop" in lines else None
    loss = lines["eval_accuracy"][1] if "eval_accuracy" in lines else None
    samples = lines["train_samples"][1] if "train_samples" in lines else 0
    reason = failure
    if not reason and status != "success":
        reason = "the target was not reached"
    if not reason and complaint:
        reason = f"the compliance checker: {complaint}"
    return RunRecord(
        log=path.name,
        seed=seed,
        converged=status == "success" and not failure,
        init_s=seconds("init_start", "init_stop"),
        run_s=seconds("run_start", "run_stop") if not failure else None,
        num_samples=samples if isinstance(samples, int) else 0,
        loss=loss if isinstance(loss, float) else None,
        accepted=not complaint,
        reason=reason,
    )


def score(
    runs: Sequence[RunRecord],
    *,
    benchmark: str,
    target_loss: float,
    verified: str,
    command: str,
    environment: Environment,
) -> TimeToTarget:
    """Return the runs with their olympic mean, or with the reason why they have none."""
    mean_s, no_score = None, ""
    refused = [run.log for run in runs if run.converged and not run.accepted]
    if refused:
        no_score = f"the compliance checker does not accept {', '.join(refused)}"
    else:
        try:
            mean_s = olympic_mean([run.run_s if run.converged else None for run in runs])
        except ConfigError as error:
            no_score = str(error)
    samples = [run.num_samples for run in runs if run.converged]
    return TimeToTarget(
        benchmark=benchmark,
        target_loss=target_loss,
        runs=tuple(runs),
        score_s=mean_s,
        no_score=no_score,
        mean_samples=statistics.fmean(samples) if samples else None,
        verified=verified,
        command=command,
        environment=environment,
    )
