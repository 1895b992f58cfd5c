"""``graphfsdp checkpoint show|convert|diff``: checkpoints without a model."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from graphfsdp.checkpoint.folder import begin, entries, resolve
from graphfsdp.checkpoint.full import describe_full, full_state, read_full_file
from graphfsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import MODEL
from graphfsdp.checkpoint.parts import whole
from graphfsdp.checkpoint.reading import CheckpointFiles
from graphfsdp.checkpoint.safetensors_file import write_state
from graphfsdp.checkpoint.values import Json, decode
from graphfsdp.checkpoint.writing import Snapshot, objects_file, write_snapshot
from graphfsdp.command_line import Parser, print_line
from graphfsdp.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Opened:
    """A checkpoint or a file that was opened without a model; only one of the two has files."""

    path: Path
    manifest: Manifest
    files: CheckpointFiles | None
    tensor: Callable[[str], Tensor]  # whole, by key


def open_any(path: str | os.PathLike[str], step: int | None = None) -> Opened:
    place = Path(path)
    if place.is_file() and place.name != MANIFEST:
        manifest, tensors = describe_full(read_full_file(place))
        return Opened(place, manifest, None, tensors.__getitem__)
    folder = resolve(place, step)
    files = CheckpointFiles(folder, read_manifest(folder))
    return Opened(folder, files.manifest, files, files.tensor)


def convert(source: str, target: str, step: int | None = None, dtype: str | None = None) -> str:
    """Write a checkpoint in another form, which the target's name says; return what was written."""
    opened = open_any(source, step)
    place = Path(target)
    if place.suffix in (".safetensors", ".pt", ".pth"):
        if place.exists():
            raise CheckpointError(f"{place} exists; nothing is overwritten: give a new name")
        facts = opened.manifest.facts
        find = _casting(opened, _parse_dtype(dtype))
        state = full_state(facts, opened.manifest.tensors, find) | {"step": facts["step"]}
        if place.suffix == ".safetensors":
            write_state(place, state["model"])
        else:
            unfinished = place.with_name(place.name + ".unfinished")
            torch.save(state, unfinished)
            os.replace(unfinished, place)
        return str(place)
    if dtype is not None:
        raise CheckpointError("a dtype can only be chosen for files, not for checkpoints")
    return str(_write_checkpoint(opened, place))


def _casting(opened: Opened, dtype: torch.dtype | None) -> Callable[[str], Tensor]:
    """Return what finds tensors, those of the model that are floating-point ones in a dtype."""

    def find(key: str) -> Tensor:
        tensor = opened.tensor(key)
        casts = key.startswith(MODEL) and tensor.is_floating_point()
        return tensor.to(dtype) if casts else tensor

    return find if dtype is not None else opened.tensor


def _write_checkpoint(opened: Opened, root: Path) -> Path:
    facts = {
        name: value
        for name, value in opened.manifest.facts.items()
        if name not in ("step", "num_ranks", "versions", "objects")
    }
    digests = opened.manifest.facts["objects"]
    objects: dict[str, Any] = {}
    if opened.files is not None:
        # Of objects whose state was another on each rank there is no single one.
        saved = opened.files.objects(objects_file(0))
        same = [name for name in saved if len({rank.get(name) for rank in digests}) == 1]
        objects = {name: saved[name] for name in same}
    # With nothing behind an object's name but the path in its state, or a checksum.
    ends = (".", "[", "#")
    kept = tuple(f"objects/{name}{end}" for name in objects for end in ends)
    keys = [
        k for k in opened.manifest.tensors if not k.startswith("objects/") or k.startswith(kept)
    ]
    parts = tuple((key, whole(opened.tensor(key))) for key in keys)
    step, name = begin(root, int(opened.manifest.facts["step"]))
    return write_snapshot(Snapshot(parts, facts, objects), root, name, step, Members())


def describe(opened: Opened, *, verify: bool, tensors: bool) -> Iterator[str]:
    manifest, facts = opened.manifest, opened.manifest.facts
    yield f"{opened.path}"
    if opened.files is not None:
        steps = ", ".join(str(entry.step) for entry in entries(opened.path.parent))
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
            hyper = decode(group["hyper"], opened.tensor)
            numbers = ", ".join(f"{key}={_readable(value)}" for key, value in hyper.items())
            yield f"    group {row}: {len(group['params'])} parameters, {numbers}"
    names = sorted({name for rank in facts["objects"] for name in rank})
    if names:
        yield f"  objects:   {', '.join(names)}"
    if tensors:
        for key, tensor in manifest.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield f"  {key}  {dtype} {list(tensor.shape)} in {len(tensor.pieces) or 1} piece(s)"
    if verify and opened.files is not None:
        opened.files.check_all()
        yield "  every checksum is right"


def differences(left: Opened, right: Opened) -> Iterator[str]:
    """Yield a line for each thing that differs between two; values bit for bit."""
    ours, theirs = left.manifest, right.manifest
    for key in dict.fromkeys((*ours.tensors, *theirs.tensors)):
        if key not in theirs.tensors or key not in ours.tensors:
            yield f"{key}: only in {(left if key in ours.tensors else right).path}"
    for key in ours.tensors:
        if key in theirs.tensors:
            line = _difference(left, right, key)
            if line is not None:
                yield f"{key}: {line}"
    a, b = _facts(left), _facts(right)
    for title in dict.fromkeys((*a, *b)):
        if title not in a or title not in b:
            yield f"{title}: only in {(left if title in a else right).path}"
        elif a[title] != b[title]:
            values = [
                _readable(decode(raw, side.tensor))
                for raw, side in ((a[title], left), (b[title], right))
            ]
            yield f"{title}: {values[0]} and {values[1]}"
    both = [opened.manifest.facts["objects"] for opened in (left, right)]
    for name in sorted({name for ranks in both for rank in ranks for name in rank}):
        digests = [{rank.get(name) for rank in ranks} for ranks in both]
        if digests[0] != digests[1]:
            yield f"objects: the state of {name!r} differs"


def _facts(opened: Opened) -> dict[str, Json]:
    """Return everything but tensors and objects, by what a line of the comparison begins with."""
    facts = opened.manifest.facts
    found = {name: facts.get(name) for name in ("step", "aliases", "extra")}
    saved = facts.get("optimizer")
    if saved is not None:
        found["optimizer"] = saved["kind"]
        found |= {f"optimizer: {key}": value for key, value in saved["rest"].items()}
        for row, group in enumerate(saved["groups"]):
            title = f"optimizer group {row}"
            found |= {f"{title}: {key}": value for key, value in group["hyper"].items()}
            found[f"{title}: parameters"] = group["params"]
        for name, state in saved["state"].items():
            title = f"optimizer state of {name!r}"
            found |= {f"{title}: {key}": value for key, value in state.items()}
    return found


def _difference(left: Opened, right: Opened, key: str) -> str | None:
    a, b = (opened.manifest.tensors[key] for opened in (left, right))
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    x, y = left.tensor(key), right.tensor(key)
    unequal = x.reshape(-1).view(torch.uint8) != y.reshape(-1).view(torch.uint8)
    count = int(unequal.view(-1, a.dtype.itemsize).any(dim=1).sum()) if x.numel() else 0
    if not count:
        return None
    distance = (x.double() - y.double()).abs().max()
    return f"{count} of {x.numel()} elements differ, by at most {float(distance):.3g}"


def _readable(value: Any) -> str:
    """Return a value of a group or a state in a line; tensors of one element as their number."""
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


def run_checkpoint_command(arguments: Sequence[str], console: Console) -> int:
    """Return 1 for a difference that was found."""
    given = _make_parser().parse_args(arguments)
    found = False
    lines: Iterable[str]
    if given.command == "show":
        opened = open_any(given.path, given.step)
        lines = describe(opened, verify=given.verify, tensors=given.tensors)
    elif given.command == "convert":
        lines = [f"written: {convert(given.source, given.target, given.step, given.dtype)}"]
    else:
        try:
            lines = [*differences(open_any(given.left), open_any(given.right))]
        except CheckpointError as error:  # 1 says that two differ, as with the diff of files
            raise ConfigError(str(error)) from None
        found = bool(lines)
    for line in lines or ["equal, bit for bit"]:
        print_line(console, line)
    return int(found)


def _make_parser() -> Parser:
    parser = Parser(
        prog="graphfsdp checkpoint", description="Look at, convert and compare checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    paths = "a folder of checkpoints (its latest), one checkpoint, a .safetensors or a .pt file"
    show = commands.add_parser("show", help="what is inside")
    show.add_argument("path", help=paths)
    show.add_argument("--step", type=int, metavar="N", help="which checkpoint of a folder")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    show.add_argument("--verify", action="store_true", help="compare every checksum")
    change = commands.add_parser("convert", help="write it in another form")
    change.add_argument("source", help=paths)
    change.add_argument(
        "target", help="a new .safetensors file (the model), a new .pt file (a full state dict of "
        "model and optimizer), or a folder, for a checkpoint",
    )  # fmt: skip
    change.add_argument("--step", type=int, metavar="N", help="which checkpoint of a folder")
    change.add_argument(
        "--dtype", metavar="NAME", help="of the model's tensors in a file, such as bfloat16"
    )
    diff = commands.add_parser(
        "diff", help="compare two; exit code 1 where they differ, 2 where one cannot be read"
    )
    diff.add_argument("left", help=paths)
    diff.add_argument("right", help=paths)
    return parser
