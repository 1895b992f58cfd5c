"""Checkpoints beside plain torch.distributed.checkpoint: ``python -m benchmarks.checkpoint_speed``.

The same tensors (a model and its Adam states) in turns, one process, in a folder of a file system.
Both sync what they write before they return; ours also hashes each file, and syncs the folder, its
new name and ``latest``. The last line is JSON: times as fast as plain dcp, median, least, most.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import graphfsdp
from graphfsdp.optim import FusedAdam


def trained(num_layers: int, width: int) -> tuple[nn.Module, FusedAdam]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    states = {
        f"{number}.{key}": value
        for number, entries in enumerate(optimizer.state.values())
        for key, value in entries.items()
    }
    return {**model.state_dict(), **states}


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure(
    folder: pathlib.Path, num_layers: int, width: int, num_rounds: int
) -> dict[str, object]:
    model, optimizer = trained(num_layers, width)
    tensors = tensors_of(model, optimizer)
    ratios: dict[str, list[float]] = {"save": [], "load": []}
    theirs, ours = folder / "dcp", folder / "graphfsdp"
    for number in range(num_rounds + 1):

        def save_plainly() -> None:
            shutil.rmtree(theirs, ignore_errors=True)
            dcp_save(tensors, storage_writer=FileSystemWriter(theirs), no_dist=True)

        def save(step: int = number) -> None:
            graphfsdp.save(ours, model, optimizer, step=step, keep_last=1, rng=False)

        def load_plainly() -> None:
            dcp_load(tensors, storage_reader=FileSystemReader(theirs), no_dist=True)

        def load() -> None:
            graphfsdp.load(ours, model, optimizer, rng=False)

        for what, acts in (("save", (save_plainly, save)), ("load", (load_plainly, load))):
            turned = acts if number % 2 else acts[::-1]
            found = {act: seconds(act) for act in turned}
            if number > 0:  # the first round warms up
                ratios[what].append(found[acts[0]] / found[acts[1]])
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "num_tensors": len(tensors),
        "num_bytes": num_bytes,
        "rounds": num_rounds,
        "torch": torch.__version__,
        **{
            what: [round(value, 3) for value in (statistics.median(all_), min(all_), max(all_))]
            for what, all_ in ratios.items()
        },
    }


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
