"""The MLLOG lines of a run: set-up, clock, blocks, validations, end; written by rank 0 alone.

Source: mlcommons/training_policies, and the rules that mlperf_logging.compliance_checker applies
to training 6.1.0.
"""

import contextlib
import importlib.util
import logging
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import graphfsdp
from graphfsdp.config import ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.ranks import Ranks
from graphfsdp.training.run_directory import in_the_words_of

UNVERIFIED = "result not verified by MLCommons Association"
RULESET = "6.1.0"
RULES = Path(__file__).with_name("mllog_rules.yaml")
_MAX_CHARACTERS = 400


class _LogFile(logging.FileHandler):
    """A file of lines; a line that cannot be written ends the run instead of being lost."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        raise  # logging calls this while it handles the exception


class RunLog:
    """Writes each moment of a run as an MLLOG line, which is in the file when it returns.

    Without a logger it keeps nothing. Samples are sequences trained on since the start, all ranks
    together.
    """

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger
        self._num_samples = self._block_samples = 0
        self._block_began = 0.0
        self._is_running = False

    def _write(self, kind: str, key: str, value: object = None, **metadata: object) -> None:
        if self._logger is not None:
            getattr(self._logger, kind)(key, value, metadata=metadata)

    def run_starts(self, step: graphfsdp.CapturedStep) -> None:
        """The graph is captured, everything is put back, and no data has been touched."""
        report = step.report()
        self._write(
            "end",
            "init_stop",
            scope=report.scope,
            capture_ms=report.capture_ms,
            graph_nodes=report.num_nodes,
            pool_bytes=report.pool_bytes,
        )
        self._write("start", "run_start")
        self._is_running = True

    def block_starts(self) -> None:
        self._block_samples = self._num_samples
        self._write("start", "block_start", samples_count=self._num_samples)
        self._block_began = time.perf_counter()

    def trained(self, num_samples: int) -> None:
        """Another iteration is done, or on its way on the device."""
        self._num_samples = num_samples

    def block_stops(self) -> None:
        seconds, num_samples = time.perf_counter() - self._block_began, self._num_samples
        speed = {"throughput": (num_samples - self._block_samples) / seconds}
        self._write("event", "tracked_stats", speed, samples_count=num_samples)
        self._write("end", "block_stop", samples_count=num_samples)
        self._write("start", "eval_start", samples_count=num_samples)

    def validated(self, loss: float) -> None:
        self._write("event", "eval_accuracy", loss, samples_count=self._num_samples)
        self._write("end", "eval_stop", samples_count=self._num_samples)

    def run_stops(self, *, success: bool) -> None:
        """The target is reached, the last iteration done, or the run has ended on its way."""
        if not self._is_running:
            return
        self._is_running = False
        status = "success" if success else "aborted"
        self._write("end", "run_stop", samples_count=self._num_samples, status=status)
        self._write("event", "train_samples", self._num_samples)


@contextlib.contextmanager
def open_run_log(
    config: TrainConfig, ranks: Ranks, device: torch.device, *, began_ms: int
) -> Iterator[RunLog]:
    """Open the log that a run asks for: on rank 0 with ``--mllog`` one that writes.

    It begins with the start of the set-up, in ms since 1970, and with all settings. Whatever ends
    the run after its clock has started, a failure or Ctrl-C too, leaves a ``run_stop``; a process
    that is killed leaves none.
    """
    if config.mllog is None or not ranks.is_first:
        yield RunLog()
        return
    with contextlib.closing(_open_file(config.mllog)) as file:
        from mlperf_logging.mllog.mllog import MLLogger

        # Not from logging's registry: two runs in one process share nothing.
        lines = logging.Logger("graphfsdp.mllog", logging.INFO)
        lines.addHandler(file)
        root = re.escape(str(Path(graphfsdp.__file__).parent.parent))
        logger = MLLogger(lines, root_dir=root, default_stack_offset=2)
        logger.event("cache_clear", value=False, time_ms=began_ms)  # graphfsdp empties none
        logger.start("init_start", time_ms=began_ms)
        logger.event("note", f"MLPerf-style log; {UNVERIFIED}")
        for key, value in _settings(config, ranks, device).items():
            logger.event(key, value)
        if config.target_loss is not None:
            logger.event("target_accuracy", config.target_loss)
        log = RunLog(logger)
        try:
            yield log
        finally:
            log.run_stops(success=False)


def require_mlperf_logging(flag: str) -> None:
    if importlib.util.find_spec("mlperf_logging") is None:
        raise ConfigError(
            f"{flag} needs the package mlperf-logging, which is not installed: "
            f'pip install "graphfsdp[mlperf]", or leave {flag} out'
        )


def _open_file(name: str) -> _LogFile:
    require_mlperf_logging("--mllog")
    path = Path(name)
    if path.is_dir() or (path.exists() and path.stat().st_size > 0):
        what = "is a directory" if path.is_dir() else "holds a log already"
        raise ConfigError(
            f"--mllog {name} {what}; nothing is overwritten: give the name of a new file"
        )
    with in_the_words_of("--mllog", name, "file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return _LogFile(name, encoding="utf-8")


def _settings(config: TrainConfig, ranks: Ranks, device: torch.device) -> dict[str, object]:
    batch, device_name = config.batch(ranks.size), f"CPU ({platform.machine()})"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    kept = "preset " + config.preset if config.out is None else f"{config.out}/config.json"
    products = "bfloat16" if config.bf16 else "fp32"
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if tf32 and not config.bf16:
        products = "tf32"
    # Gradients are reduced in float32; weights that are not kept by all travel as model weights.
    gathers = ranks.launched and config.sharding is not ShardingStrategy.NO_SHARD
    return {
        "submission_benchmark": config.mllog_benchmark,
        "submission_org": "unverified",
        "submission_division": "closed",
        "submission_status": "research",
        "submission_platform": f"{ranks.size}x {device_name}",
        "seed": config.seed,
        "config_filename": kept,
        "global_batch_size": batch.num_sequences,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": batch.num_microbatches,
        "max_sequence_length": config.seq_length,
        "max_steps": config.train_iters,
        "eval_samples": config.eval_iters * config.micro_batch_size,
        "tensor_parallelism": 1,
        "pipeline_parallelism": 1,
        "context_parallelism": 1,
        "expert_parallelism": 1,
        "opt_name": "adamw",
        "opt_base_learning_rate": config.lr,
        "opt_end_learning_rate": config.min_lr,
        "opt_learning_rate_warmup_steps": config.lr_warmup_iters,
        "opt_learning_rate_warmup_samples": config.lr_warmup_iters * batch.num_sequences,
        "opt_learning_rate_decay_steps": config.train_iters - config.lr_warmup_iters,
        "opt_learning_rate_decay_schedule": f"{config.lr_decay_style} with linear warmup",
        "opt_adamw_beta_1": config.adam_beta1,
        "opt_adamw_beta_2": config.adam_beta2,
        "opt_adamw_epsilon": config.adam_eps,
        "opt_adamw_weight_decay": config.weight_decay,
        "opt_gradient_clip_norm": config.clip_grad,
        "lowest_numerical_precision_in_linear": products,
        "lowest_numerical_precision_in_attn": products,
        "lowest_numerical_precision_in_comm": "bfloat16" if gathers and config.bf16 else "fp32",
    }


def compliance_complaint(log: Path, benchmark: str) -> str:
    """Return what the official checker says against a log; empty if it accepts it.

    Benchmarks that it does not know are judged by our rules. Its whole answer is kept beside the
    log, with ``.compliance`` added to the name.
    """
    kept = log.with_name(log.name + ".compliance")
    official = files("mlperf_logging.compliance_checker") / f"training_{RULESET}"
    is_known = (official / f"closed_{benchmark}.yaml").is_file()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mlperf_logging.compliance_checker"),
            *("--usage", "training", "--ruleset", RULESET, "--log_output", str(kept)),
            *(() if is_known else ("--config", str(RULES))),
            str(log),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    return " ".join(" ".join(said).split())[:_MAX_CHARACTERS] or "no answer"
