"""Checkpoints beside plain torch.distributed.checkpoint: ``python -m benchmarks.checkpoint_speed``.

The same tensors (a model and its Adam states) in turns, one process, in a folder of a file system.
Both sync what they write before they return; ours also hashes each file, and syncs the folder, its
new name and ``latest``. The line is JSON: times as fast as plain dcp, median, least, most.
"""

import itertools
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import graphfsdp
from graphfsdp.bench.measure import in_turns, time_window
from graphfsdp.optim import FusedAdam

NUM_LAYERS, WIDTH, NUM_ROUNDS = 64, 512, 10


def ratios_of(plainly: Callable[[], object], by_us: Callable[[], object]) -> list[float]:
    def milliseconds(act: Callable[[], object]) -> Callable[[], float]:
        return lambda: time_window([act], torch.device("cpu")).mean_ms

    acts = {"dcp": milliseconds(plainly), "ours": milliseconds(by_us)}
    times = in_turns(acts, range(NUM_ROUNDS + 1))
    ratios = [a / b for a, b in zip(times["dcp"][1:], times["ours"][1:], strict=True)]  # warm
    spread = statistics.median(ratios), min(ratios), max(ratios)
    return [round(value, 3) for value in spread]


def measure(folder: pathlib.Path) -> dict[str, object]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    tensors = model.state_dict()
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{key}": value for key, value in state.items()}
    theirs, ours, steps = folder / "dcp", folder / "graphfsdp", itertools.count()

    def save_plainly() -> None:
        shutil.rmtree(theirs, ignore_errors=True)
        dcp_save(tensors, storage_writer=FileSystemWriter(theirs), no_dist=True)

    def save() -> None:
        graphfsdp.save(ours, model, optimizer, step=next(steps), keep_last=1, rng=False)

    def load_plainly() -> None:
        dcp_load(tensors, storage_reader=FileSystemReader(theirs), no_dist=True)

    def load() -> None:
        graphfsdp.load(ours, model, optimizer, rng=False)

    return {
        "num_tensors": len(tensors),
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "torch": torch.__version__,
        "save": ratios_of(save_plainly, save),
        "load": ratios_of(load_plainly, load),
    }


if __name__ == "__main__":
    (parent,) = sys.argv[1:] or (None,)  # where to write
    with tempfile.TemporaryDirectory(dir=parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        print(json.dumps(measure(pathlib.Path(folder))))
