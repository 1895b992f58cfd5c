"""Reads what a checkpoint says of itself, and checks that its files are as they were written."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from graphfsdp.checkpoint.folder import entries
from graphfsdp.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    Manifest,
    SavedFile,
    SavedTensor,
    dump_body,
)
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.values import Json, dtype_of
from graphfsdp.checkpoint.version_1 import read_body
from graphfsdp.errors import CheckpointDamagedError, CheckpointError

_MAX_NAMED = 20


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    try:
        document = json.loads(content)
        known, version = document["format"] == FORMAT, int(document["version"])
        digest, body = document["sha256_of_body"], document["body"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error!r}") from None
    if not known or version > VERSION:
        raise CheckpointError(
            f"{path} has the format {document['format']!r} version {version}; this release reads "
            f"{FORMAT!r} up to version {VERSION}"
        )
    if hashlib.sha256(dump_body(body)).hexdigest() != digest:
        raise CheckpointDamagedError(f"{path} is damaged: its checksum differs")
    if version == 1:
        return read_body(body)
    return Manifest(
        facts=body["facts"],
        files={name: SavedFile(*file) for name, file in body["files"].items()},
        tensors={
            key: SavedTensor(dtype_of(dtype), tuple(shape))
            for key, (dtype, shape) in body["tensors"].items()
        },
    )


def read_objects(folder: Path, manifest: Manifest, name: str) -> dict[str, Json]:
    """Return the states in a file of objects, which is checked here: it is read before the rest."""
    _refuse_damage(folder, _damage_of(folder, manifest, [name]))
    found: dict[str, Json] = json.loads((folder / name).read_bytes())
    return found


def check_files(folder: Path, manifest: Manifest, members: Members) -> None:
    """Read every file once, each on one of the ranks; what one of them finds, all raise."""
    mine = sorted(manifest.files)[members.rank :: members.size]
    damage = members.gather(_damage_of(folder, manifest, mine))
    _refuse_damage(folder, [line for lines in damage for line in lines])


def _damage_of(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    found = (manifest.files[name].find_damage(folder / name) for name in names)
    return [damage for damage in found if damage is not None]


def _refuse_damage(folder: Path, damage: Sequence[str]) -> None:
    if not damage:
        return
    named = "\n".join(f"  {line}" for line in damage[:_MAX_NAMED])
    more = len(damage) - _MAX_NAMED
    raise CheckpointDamagedError(
        f"the checkpoint {folder} is damaged; nothing was loaded:\n{named}"
        + (f"\n  and {more} more" if more > 0 else "")
        + "\nRemedy: load an earlier one (step=...), or copy this one anew"
    )


def name_last_good(damaged: Path) -> str:
    """Read as a whole, so that nobody is sent from one damaged checkpoint to the next."""
    known = entries(damaged.parent)
    names = [entry.name for entry in known]
    earlier = known[: names.index(damaged.name)] if damaged.name in names else known
    for entry in reversed(earlier):
        folder = damaged.parent / entry.name
        try:
            manifest = read_manifest(folder)
            _refuse_damage(folder, _damage_of(folder, manifest, list(manifest.files)))
        except CheckpointError:
            continue
        place = f"step={entry.step} of {damaged.parent}, or the path {folder}"
        return f"The newest one before it without damage is {place}"
    return f"None before it is without damage in {damaged.parent}"
