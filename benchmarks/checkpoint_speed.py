"""Saving and loading a model and its Adam states beside plain torch.distributed.checkpoint.

The same tensors, in turns, in one process; both sync what they write. Ours computes and compares
checksums, writes aside and renames. ``python -m benchmarks.checkpoint_speed`` prints the ratios
and writes ``checkpoint_speed.json``.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import graphfsdp
from benchmarks.environment import describe, output_directory
from benchmarks.timing import as_record, interleave
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

_DEVICE = torch.device("cpu")


def make_run(num_layers: int, width: int) -> tuple[nn.Module, FusedAdam]:
    """Return a GPT and an optimizer that has stepped once."""
    model = GPT(
        GPTConfig(
            vocab_size=8192,
            seq_length=128,
            num_layers=num_layers,
            hidden_size=width,
            num_attention_heads=8,
        )
    )
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    """Return everything by a flat name, for plain dcp."""
    found = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"optim.{name}.{key}": value for key, value in optimizer.state[param].items()}
    return found


def contenders(
    folder: Path, model: nn.Module, optimizer: FusedAdam
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Return what saves, and what loads what was saved."""
    tensors = tensors_of(model, optimizer)
    ours, theirs = folder / "ours", folder / "theirs"
    saves: dict[str, Callable[[], object]] = {
        "dcp": lambda: dcp_save(tensors, checkpoint_id=theirs),
        "graphfsdp": lambda: graphfsdp.save(ours, model, optimizer, keep_last=1),
    }
    loads: dict[str, Callable[[], object]] = {
        "dcp": lambda: dcp_load(tensors, checkpoint_id=theirs),
        "graphfsdp": lambda: graphfsdp.load(ours, model, optimizer),
    }
    return saves, loads


def measure(num_rounds: int, num_layers: int, width: int) -> dict[str, object]:
    """Return the record of both directions."""
    torch.set_num_threads(1)
    model, optimizer = make_run(num_layers, width)
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(model, optimizer).values())
    found: dict[str, object] = {"environment": describe(_DEVICE), "num_bytes": num_bytes}
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-speed-"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dcp warns that it runs in a single process
            for name, runs in zip(
                ("save", "load"), contenders(folder, model, optimizer), strict=True
            ):
                for run in runs.values():
                    run()
                found[name] = as_record(interleave(runs, num_rounds, 1, _DEVICE), "dcp")
    finally:
        shutil.rmtree(folder)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write ``checkpoint_speed.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args(arguments)
    found = measure(options.rounds, options.num_layers, options.width)
    path = output_directory() / "checkpoint_speed.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    num_bytes = found["num_bytes"]
    assert isinstance(num_bytes, int)
    for name in ("save", "load"):
        record = found[name]
        assert isinstance(record, dict)
        ours = record["graphfsdp"]
        speed = ours["speedup"]
        print(
            f"{name}: {num_bytes / 1e6:.0f} MB in {ours['step_ms']:.0f} ms; "
            f"{speed['median']:.3f} times as fast as plain dcp "
            f"({speed['minimum']:.3f} to {speed['maximum']:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
