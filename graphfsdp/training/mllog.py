"""The MLLOG lines of a run: set-up, clock, blocks, validations, end; written by rank 0 alone."""

import importlib.util
import logging
import math
import re
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import graphfsdp
from graphfsdp.errors import ConfigError
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.mllog_settings import run_settings, submission_settings
from graphfsdp.training.ranks import Ranks
from graphfsdp.training.run_log import RunLog
from graphfsdp.training.termination import LastWords

UNVERIFIED = "result not verified by MLCommons Association"
_LOGGER_NAME = "graphfsdp.mllog"


def refuse_unusable_log(config: TrainConfig) -> None:
    """Check that the package is there and that no file would be overwritten.

    Raises:
        ConfigError: one of them is not so; the message says how to mend it.
    """
    if config.mllog is None:
        return
    if importlib.util.find_spec("mlperf_logging") is None:
        raise ConfigError(
            "--mllog writes through the package mlperf-logging, which is not installed: "
            "pip install mlperf-logging, or leave --mllog out"
        )
    path = Path(config.mllog)
    if path.is_dir() or (path.exists() and path.stat().st_size > 0):
        what = "is a directory" if path.is_dir() else "holds a log already"
        raise ConfigError(
            f"--mllog {config.mllog} {what}; nothing is overwritten: give the name of a new file"
        )


class _LogFile(logging.FileHandler):
    """A file of lines; a line that cannot be written ends the run instead of being lost."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        raise  # logging calls this while it handles the exception


class MlperfLog(RunLog):
    """Writes each moment of a run as an MLLOG line, which is in the file when it returns.

    Whatever ends the run after its clock has started, a failure or SIGTERM too, leaves a
    ``run_stop``.
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks, device: torch.device, *, began_ms: int
    ) -> None:
        """Begin the log with the start of the set-up, and with all settings.

        Args:
            config: The run, with ``mllog``.
            ranks: All that train together; this is the first.
            device: What it trains on.
            began_ms: Milliseconds since 1970 when the set-up began.

        Raises:
            ConfigError: the file cannot be made.
        """
        from mlperf_logging.mllog.mllog import MLLogger

        assert config.mllog is not None
        try:
            Path(config.mllog).parent.mkdir(parents=True, exist_ok=True)
            self._file = _LogFile(config.mllog, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--mllog {config.mllog} cannot be made ({error.strerror or error}); give a file "
                "that can"
            ) from None
        # Not from logging's registry: two runs in one process share nothing.
        lines = logging.Logger(_LOGGER_NAME, logging.INFO)
        lines.addHandler(self._file)
        root = re.escape(str(Path(graphfsdp.__file__).parent.parent))
        self._logger = MLLogger(lines, root_dir=root)
        self._num_samples = 0
        self._is_running = False
        self._one_end = threading.Lock()
        self._last_words = LastWords(self._abort)
        self._block_began = 0.0
        self._block_samples = 0
        self._logger.event("cache_clear", config.mllog_cache_cleared, time_ms=began_ms)
        self._logger.start("init_start", time_ms=began_ms)
        self._logger.event("note", f"MLPerf-style log; {UNVERIFIED}")
        settings = submission_settings(config, ranks, device) | run_settings(config, ranks, device)
        for key, value in settings.items():
            self._logger.event(key, value)
        if config.target_loss is not None:
            self._logger.event("target_accuracy", config.target_loss)

    def run_starts(self, step: graphfsdp.CapturedStep) -> None:
        """End the set-up and start the clock."""
        report = step.report()
        facts = {
            "scope": report.scope,
            "capture_ms": report.capture_ms,
            "graph_nodes": report.num_nodes,
            "pool_bytes": report.pool_bytes,
        }
        self._logger.end("init_stop", metadata=facts)
        self._logger.start("run_start")
        self._is_running = True

    def block_starts(self, num_samples: int) -> None:
        """Start a stretch of training."""
        self._num_samples = self._block_samples = num_samples
        self._logger.start("block_start", metadata={"samples_count": num_samples})
        self._block_began = time.perf_counter()

    def trained(self, num_samples: int) -> None:
        """Remember how far the run is, for its end."""
        self._num_samples = num_samples

    def block_stops(self, num_samples: int) -> None:
        """End a stretch of training, with its speed, and start a validation."""
        seconds = time.perf_counter() - self._block_began
        self._num_samples = num_samples
        where = {"samples_count": num_samples}
        speed = {"throughput": (num_samples - self._block_samples) / seconds}
        self._logger.event("tracked_stats", speed, metadata=where)
        self._logger.end("block_stop", metadata=where)
        self._logger.start("eval_start", metadata=where)

    def validated(self, num_samples: int, loss: float) -> None:
        """End a validation, with its loss."""
        where = {"samples_count": num_samples}
        self._logger.event("eval_accuracy", loss, metadata=where)
        self._logger.end("eval_stop", metadata=where)

    def run_stops(self, num_samples: int, *, success: bool) -> None:
        """Stop the clock, once."""
        with self._one_end:
            if not self._is_running:
                return
            self._is_running = False
        status = "success" if success else "aborted"
        metadata: dict[str, object] = {"samples_count": num_samples, "status": status}
        self._logger.end("run_stop", metadata=metadata)
        self._logger.event("train_samples", num_samples)

    def _abort(self) -> None:
        self.run_stops(self._num_samples, success=False)

    def __enter__(self) -> Self:
        self._last_words.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._last_words.__exit__(kind, error, traceback)
            self._abort()
        finally:
            self._file.close()


def make_run_log(
    config: TrainConfig, ranks: Ranks, device: torch.device, *, began_ms: int
) -> RunLog:
    """Return the log that a run asks for: on rank 0 with ``--mllog`` one that writes.

    Raises:
        ConfigError: it cannot be written.
    """
    if config.mllog is None or not ranks.is_first:
        return RunLog()
    refuse_unusable_log(config)
    return MlperfLog(config, ranks, device, began_ms=began_ms)


def is_success(config: TrainConfig, loss: float) -> bool:
    """Return whether a run that ends with this validation loss did what was asked for."""
    return math.isfinite(loss) if config.target_loss is None else reached(config, loss)


def reached(config: TrainConfig, loss: float | None) -> bool:
    """Return whether a validation loss, if there is one, is at most the target, if there is one."""
    return config.target_loss is not None and loss is not None and loss <= config.target_loss
