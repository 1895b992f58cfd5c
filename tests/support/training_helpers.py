"""Small runs of the trainer through its command line: what they leave, and how they are ended."""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import forked_programs
from graphfsdp.cli import main
from time_limits import until

TEXT = argparse.__file__  # real text that every Python has; 16 KiB or more of it are held out
# Of a flag that is given again, the last one counts.
SMALL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--clip-grad", "0.5", "--lr", "1e-2", "--lr-warmup-iters", "6", "--log-interval", "1"),
    *("--eval-iters", "2", "--data", TEXT),
]
DROPOUT = ["--hidden-dropout", "0.2", "--attention-dropout", "0.1"]

Lines = list[dict[str, Any]]


def train(device: torch.device, *flags: str) -> int:
    return main(["train", *SMALL, "--device", device.type, *flags])


def lines_of(out: Path) -> Lines:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(lines: Lines, *, validated: bool = True) -> list[tuple[Any, ...]]:
    """What must be equal bit for bit: everything but speed, memory and phase."""
    names = ("step", "loss", "lr", "grad_norm", "tokens", *(("val_loss",) if validated else ()))
    return [tuple(line.get(name) for name in names) for line in lines]


def assert_same_run(out: Path, reference: Path) -> None:
    assert numbers(lines_of(out)) == numbers(lines_of(reference))
    model = "model.safetensors"
    assert (out / model).read_bytes() == (reference / model).read_bytes()


@contextlib.contextmanager
def started(arguments: list[str], is_ready: Callable[[], bool]) -> Iterator[forked_programs.Forked]:
    """Run a training in a process of its own until something is there; end it afterwards."""
    with forked_programs.forked(main, arguments) as process:

        def is_ready_or_over() -> bool:
            return is_ready() or not process.is_alive()

        assert until(is_ready_or_over, 100)
        assert process.is_alive(), process.ended()
        yield process
