"""``graphfsdp checkpoint show|convert``: checkpoints without a model."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from graphfsdp.checkpoint.folder import entries, resolve
from graphfsdp.checkpoint.full import full_state
from graphfsdp.checkpoint.manifest import read_manifest
from graphfsdp.checkpoint.named import MODEL
from graphfsdp.checkpoint.reading import CheckpointFiles
from graphfsdp.checkpoint.safetensors_file import write_state
from graphfsdp.checkpoint.values import decode
from graphfsdp.command_line import Parser, print_line
from graphfsdp.errors import CheckpointError

FILES = (".safetensors", ".pt", ".pth")


def open_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> CheckpointFiles:
    folder = resolve(Path(path), step)
    return CheckpointFiles(folder, read_manifest(folder))


def convert(source: str, target: str, step: int | None = None, dtype: str | None = None) -> str:
    """Write a checkpoint as the kind of file that the target's name says; return that name."""
    place = Path(target)
    if place.suffix not in FILES:
        raise CheckpointError(f"{place} is no name of a file that ends in {', '.join(FILES)}")
    if place.exists():
        raise CheckpointError(f"{place} exists; nothing is overwritten: give a new name")
    files = open_checkpoint(source, step)
    facts = files.manifest.facts
    state = full_state(facts, files.manifest.tensors, _casting(files, _parse_dtype(dtype)))
    if place.suffix == ".safetensors":
        write_state(place, state["model"])
    else:
        unfinished = place.with_name(place.name + ".unfinished")
        torch.save(state | {"step": facts["step"]}, unfinished)
        os.replace(unfinished, place)
    return str(place)


def _casting(files: CheckpointFiles, dtype: torch.dtype | None) -> Callable[[str], Tensor]:
    """Return what finds tensors, those of the model that are floating-point ones in a dtype."""

    def find(key: str) -> Tensor:
        tensor = files.tensor(key)
        casts = key.startswith(MODEL) and tensor.is_floating_point()
        return tensor.to(dtype) if casts else tensor

    return find if dtype is not None else files.tensor


def describe(files: CheckpointFiles, *, verify: bool, tensors: bool) -> Iterator[str]:
    manifest, facts = files.manifest, files.manifest.facts
    yield f"{files.folder}"
    steps = ", ".join(str(entry.step) for entry in entries(files.folder.parent))
    versions = " ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield f"  step:      {facts['step']} (in this folder: {steps})"
    yield f"  saved by:  {facts['num_ranks']} rank(s), {versions}"
    for name, prefix in (("model", MODEL), ("optimizer", "optimizer/"), ("objects", "objects/")):
        found = [saved for key, saved in manifest.tensors.items() if key.startswith(prefix)]
        if found:
            numel = sum(torch.Size(saved.shape).numel() for saved in found)
            num_bytes = sum(
                torch.Size(saved.shape).numel() * saved.dtype.itemsize for saved in found
            )
            yield (
                f"  {name + ':':<10} {len(found)} tensors, {numel:,} elements, {num_bytes:,} bytes"
            )
    if "optimizer" in facts:
        saved = facts["optimizer"]
        yield f"  optimizer: {saved['kind']}, {len(saved['state'])} parameters with a state"
        for row, group in enumerate(saved["groups"]):
            hyper = decode(group["hyper"], files.tensor)
            numbers = ", ".join(f"{key}={_readable(value)}" for key, value in hyper.items())
            yield f"    group {row}: {len(group['params'])} parameters, {numbers}"
    names = sorted({name for rank in facts["objects"] for name in rank})
    if names:
        yield f"  objects:   {', '.join(names)}"
    if tensors:
        for key, tensor in manifest.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield f"  {key}  {dtype} {list(tensor.shape)} in {len(tensor.pieces) or 1} piece(s)"
    if verify:
        files.check_all()
        yield "  every checksum is right"


def _readable(value: Any) -> str:
    """Return a value of a group in a line; tensors of one element as their number."""
    if isinstance(value, Tensor):
        return f"{value.item()} ({value.dtype})" if value.numel() == 1 else f"{tuple(value.shape)}"
    return f"{value}"


def _parse_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{name!r} is no floating-point dtype of torch")
    return dtype


def run_checkpoint_command(arguments: Sequence[str], console: Console) -> None:
    given = _make_parser().parse_args(arguments)
    if given.command == "show":
        files = open_checkpoint(given.path, given.step)
        for line in describe(files, verify=given.verify, tensors=given.tensors):
            print_line(console, line)
    else:
        written = convert(given.source, given.target, given.step, given.dtype)
        print_line(console, f"written: {written}")


def _make_parser() -> Parser:
    parser = Parser(prog="graphfsdp checkpoint", description="Look at and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    paths = "a folder of checkpoints (its latest), or one checkpoint"
    show = commands.add_parser("show", help="what is inside")
    show.add_argument("path", help=paths)
    show.add_argument("--step", type=int, metavar="N", help="which checkpoint of a folder")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    show.add_argument("--verify", action="store_true", help="compare every checksum")
    change = commands.add_parser("convert", help="write it as one file")
    change.add_argument("source", help=paths)
    change.add_argument(
        "target", help="a new .safetensors file (the model), or a new .pt file (a full state dict "
        "of model and optimizer)",
    )  # fmt: skip
    change.add_argument("--step", type=int, metavar="N", help="which checkpoint of a folder")
    change.add_argument("--dtype", metavar="NAME", help="of the model's tensors, such as bfloat16")
    return parser
