"""What a run tells at its logged steps, and leaves: a directory, logs of other programs."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import save_file
from torch import Tensor

from graphfsdp.checkpoint.folder import entries, resolve
from graphfsdp.errors import CheckpointError, ConfigError
from graphfsdp.training.config import TrainConfig


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.jsonl``; losses are nats per token."""

    step: int  # iterations done, this one included
    loss: float  # of this iteration's batch, all ranks together
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # trained on so far, all ranks together
    tokens_per_s: float  # since the last logged step, all ranks together
    step_ms: float  # over the same iterations
    memory_bytes: int  # most used so far: of the GPU's allocator, or of rank 0's process
    phase: str  # warmup, capture, replay or eager
    data_wait: float = 0.0  # share of that time in which rank 0 waited for its batches
    mfu: float | None = None  # of the GPUs' peak arithmetic, None if unknown
    val_loss: float | None = None  # of the held-out part, None where it was not measured

    def to_json(self) -> str:
        """Return one line of JSON; floats are written so that they read back bit for bit."""
        known = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(known)

    def describe(self, train_iters: int) -> str:
        parts = [
            f"step {self.step:>{len(str(train_iters))}}/{train_iters}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_s:,.0f} tok/s",
            f"{self.step_ms:.1f} ms" if self.step_ms >= 10 else f"{self.step_ms:.2f} ms",
            f"{self.memory_bytes / 2**20:,.0f} MiB",
        ]
        if self.data_wait >= 0.0005:
            parts.append(f"data {self.data_wait:.1%}")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.val_loss is not None:
            parts.append(f"validation {self.val_loss:.4f}")
        if self.phase not in ("replay", "eager"):
            parts.append(self.phase)
        if not math.isfinite(self.loss):
            parts.append("(not finite: try a smaller --lr)")
        return "  ".join(parts)


Sink = Callable[[Metrics], object]


def refuse_unusable_directories(config: TrainConfig) -> None:
    """Look at those for the run and for checkpoints before the minutes that a large model takes."""
    if config.out is not None:
        make_new_directory(config.out, resumes=config.load is not None, looks_only=True)
    if config.save is not None:
        with in_the_words_of("--save", config.save):
            Path(config.save).mkdir(parents=True, exist_ok=True)
    if config.load is not None and not begins_anew(config):
        try:
            resolve(Path(config.load))
        except CheckpointError as error:
            raise ConfigError(f"--load {config.load}: {error}") from None


def begins_anew(config: TrainConfig) -> bool:
    """Tell whether a run that saves where it loads has saved nothing yet."""
    if config.load is None or config.load != config.save:
        return False
    return not entries(Path(config.load))


def make_new_directory(out: str, *, resumes: bool = False, looks_only: bool = False) -> Path:
    """Make a directory in which nothing would be overwritten, or refuse it (ConfigError).

    Nothing but the same run that is gone on with.
    """
    path = Path(out)
    if resumes and (path / "config.json").is_file():
        return path
    with in_the_words_of("--out", out):
        held: Path | None = path if path.exists() else None
        if path.is_dir():
            held = next(path.iterdir(), None)
        if held is not None:
            what = "is not a directory" if held == path else f"holds another run ({held.name})"
            raise ConfigError(
                f"--out {out} {what}; nothing is overwritten: give a new or an empty directory"
            )
        if not looks_only:
            path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def in_the_words_of(flag: str, name: str, kind: str = "directory") -> Iterator[None]:
    """Say of a failure of the file system which flag has asked for what cannot be made."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{flag} {name} cannot be made ({reason}); give a {kind} that can"
        ) from None


def _open_metrics(config: TrainConfig, out: str, facts: Mapping[str, object], start: int) -> TextIO:
    """Make the directory, write ``config.json``, and open ``metrics.jsonl`` for further lines.

    What an earlier process has kept of a run that goes on stays up to iteration ``start``.
    """
    folder = make_new_directory(out, resumes=config.load is not None)
    metrics = folder / "metrics.jsonl"
    with in_the_words_of("--out", out):
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        whole = (line for line in lines if line.endswith("}\n"))  # the last may be cut off
        kept = "".join(line for line in whole if json.loads(line)["step"] <= start)
        settings = json.dumps(facts, indent=2) + "\n"
        _replace(folder / "config.json", lambda new: new.write_text(settings))
        _replace(metrics, lambda new: new.write_text(kept))
        # A line is in the file when it was written, so that whatever ends the run leaves it.
        return metrics.open("a", buffering=1)


def write_model(target: Path, state: Mapping[str, Tensor]) -> None:
    """Write a file that appears when it is complete."""
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    _replace(target, lambda new: save_file(tensors, new, {"format": "pt"}))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Whenever the process ends, the file is either the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write(unfinished)
    os.replace(unfinished, path)


def open_sinks(
    config: TrainConfig, facts: Mapping[str, object], start: int, stack: ExitStack
) -> list[Sink]:
    """Return what takes each logged step: the run's own file, and other programs.

    The stack closes all of it. Of a run that goes on, what TensorBoard has of steps behind
    ``start`` is no longer shown.
    """
    sinks: list[Sink] = []
    if config.out is not None:
        file = stack.enter_context(_open_metrics(config, config.out, facts, start))
        sinks.append(lambda metrics: file.write(metrics.to_json() + "\n"))
    try:
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter(f"{config.out}/tensorboard", purge_step=start + 1)
            stack.callback(writer.close)
            sinks.append(lambda metrics: _write(writer, metrics))
        if config.wandb is not None:
            import wandb

            run = stack.enter_context(wandb.init(project=config.wandb, config=dict(facts)))
            sinks.append(lambda metrics: run.log(_numbers(metrics), step=metrics.step))
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard and --wandb need the packages of these names ({error}): pip install "
            '"graphfsdp[tensorboard,wandb]", or leave them out'
        ) from None
    return sinks


def _write(writer: Any, metrics: Metrics) -> None:
    for name, value in _numbers(metrics).items():
        writer.add_scalar(name, value, metrics.step)


def _numbers(metrics: Metrics) -> dict[str, float]:
    found = dataclasses.asdict(metrics)
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
