"""Reads the list of what a checkpoint holds, of this version and of older ones."""

import hashlib
import json
from pathlib import Path

from graphfsdp.checkpoint.folder import MANIFEST, entries
from graphfsdp.checkpoint.manifest import (
    FORMAT,
    VERSION,
    Manifest,
    SavedFile,
    SavedTensor,
    dump,
)
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.values import dtype_of
from graphfsdp.checkpoint.version_1 import read_body
from graphfsdp.errors import CheckpointDamagedError, CheckpointError


def read_manifest(folder: Path) -> Manifest:
    """Read the list of a checkpoint.

    CheckpointDamagedError: it is not what was written; CheckpointError: it cannot be read.
    """
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
            f"{path} has the format {document['format']!r} version {version}; this release "
            f"reads {FORMAT!r} up to version {VERSION}"
        )
    if hashlib.sha256(dump(body)).hexdigest() != digest:
        raise CheckpointDamagedError(f"{path} is damaged: its checksum differs")
    if version == 1:
        return read_body(body)
    tensors = {
        key: SavedTensor(dtype_of(dtype), tuple(shape))
        for key, (dtype, shape) in body["tensors"].items()
    }
    files = {name: SavedFile(*file) for name, file in body["files"].items()}
    return Manifest(body["facts"], files, tensors)


def name_last_good(damaged: Path) -> str:
    """Read as a whole, so that nobody is sent from one damaged checkpoint to the next."""
    known = entries(damaged.parent)
    names = [entry.name for entry in known]
    earlier = known[: names.index(damaged.name)] if damaged.name in names else known
    for entry in reversed(earlier):
        folder = damaged.parent / entry.name
        try:
            read_manifest(folder).check_files(folder, Members())
        except CheckpointError:
            continue
        place = f"step={entry.step} of {damaged.parent}, or the path {folder}"
        return f"The newest one before it without damage is {place}"
    return f"None before it is without damage in {damaged.parent}"
