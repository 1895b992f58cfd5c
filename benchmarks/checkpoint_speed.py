"""Checkpoints beside plain torch.distributed.checkpoint: ``python -m benchmarks.checkpoint_speed``.

The same tensors (a model and its Adam states) in turns, one process, in a folder of a file system.
Both sync what they write before they return; ours also hashes each file, and syncs the folder, its
new name and ``latest``. The last line is JSON: times as fast as plain dcp, median, least, most.
"""

import argparse
import itertools
import json
import pathlib
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import graphfsdp
from graphfsdp.bench.clock import in_turns, time_window
from graphfsdp.optim import FusedAdam


def seconds(act: Callable[[], object]) -> Callable[[], float]:
    return lambda: time_window([act], torch.device("cpu")).mean_ms / 1e3


def measure(
    folder: pathlib.Path, num_layers: int, width: int, num_rounds: int
) -> dict[str, object]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.randn(4, width)).square().mean().backward()
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

    found: dict[str, object] = {
        "num_tensors": len(tensors),
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "rounds": num_rounds,
        "torch": torch.__version__,
    }
    for what, plainly, by_us in (("save", save_plainly, save), ("load", load_plainly, load)):
        times = in_turns({"dcp": seconds(plainly), "ours": seconds(by_us)}, num_rounds + 1)
        ratios = [a / b for a, b in zip(times["dcp"][1:], times["ours"][1:], strict=True)]  # warm
        spread = statistics.median(ratios), min(ratios), max(ratios)
        found[what] = [round(value, 3) for value in spread]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="where to write; a new one below the system's for files")
    parser.add_argument("--layers", type=int, default=64, help="linear ones")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        print(json.dumps(measure(pathlib.Path(folder), given.layers, given.width, given.rounds)))


if __name__ == "__main__":
    main()
