"""Small runs of the trainer through its command line: what they leave, and how they are ended."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from graphfsdp.cli import main

ROOT = Path(__file__).parents[1]
TEXT = argparse.__file__  # real text that every Python has; 16 KiB or more of it are held out
# Of a flag that is given again, the last one counts.
SMALL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--clip-grad", "0.5", "--lr", "1e-2", "--lr-warmup-iters", "6", "--log-interval", "1"),
    *("--eval-iters", "2", "--sample-tokens", "0", "--no-progress", "--data", TEXT),
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
def started(
    arguments: list[str], is_ready: Callable[[], bool]
) -> Iterator["subprocess.Popen[str]"]:
    """Run a training in a process of its own until something is there; end it afterwards."""
    # A parent that ignores SIGINT, as a shell's background job does, would pass that on.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from graphfsdp.cli import main; sys.exit(main({arguments!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 100
            while not is_ready():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.002)
            yield process
        finally:
            process.kill()


def ended(process: "subprocess.Popen[str]", number: signal.Signals) -> tuple[int, str]:
    """End a process by a signal; return its exit code and what it complained of."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors
