"""Kills a process that saves, again and again at random moments; prints what was found as JSON.

Arguments: folder, number of kills, seed. It forks, so it is a program of its own: one thread, and
everything imported before.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from time_limits import until

UNFINISHED = ".unfinished-"


def model_of(step: int) -> tuple[nn.Module, FusedAdam]:
    """Return a model whose every number says which step it is of."""
    model = nn.Linear(64, 32)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    fill(model, optimizer, step)
    return model, optimizer


def fill(model: nn.Module, optimizer: FusedAdam, step: int) -> None:
    with torch.no_grad():
        for tensor in numbers(model, optimizer):
            tensor.fill_(step)


def numbers(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
    states = [state for param in optimizer.state.values() for state in param.values()]
    return [*model.parameters(), *states]


def is_all(step: int, model: nn.Module, optimizer: FusedAdam) -> bool:
    return all(bool((tensor == step).all()) for tensor in numbers(model, optimizer))


def loaded_step(root: Path) -> int:
    """Load the latest checkpoint and check that it is all of one step."""
    model, optimizer = model_of(-1)
    step = graphfsdp.load(root, model, optimizer).step
    assert is_all(step, model, optimizer)
    return step


def save_forever(root: Path, step: int) -> None:
    model, optimizer = model_of(step)
    while True:
        graphfsdp.save(root, model, optimizer, step=step, keep_last=2)
        step += 1
        fill(model, optimizer, step)


def differs(path: Path, written_ns: int) -> bool:
    return path.stat().st_mtime_ns != written_ns


def main() -> None:
    root, num_kills = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(int(sys.argv[3]))
    torch.set_num_threads(1)
    model, optimizer = model_of(1)
    graphfsdp.save(root, model, optimizer, step=1)
    step, advances, interrupted = loaded_step(root), 0, 0
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            save_forever(root, step + 1)
        until(partial(differs, root / "latest", (root / "latest").stat().st_mtime_ns), 30)
        time.sleep(random.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(path.name.startswith(UNFINISHED) for path in root.iterdir())
        now = loaded_step(root)
        assert now >= step, f"step {step} was complete, now {now} is the latest"
        advances += now > step
        step = now
    print(json.dumps({"advances": advances, "interrupted": interrupted, "step": step}))


if __name__ == "__main__":
    main()
