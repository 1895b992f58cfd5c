"""The folder of a run's checkpoints: what is complete is visible, and nothing else.

Note [Order of a save]: every rank writes into ``.unfinished-NAME`` and syncs its files; rank 0
writes and syncs the manifest, syncs the folder, renames it to ``NAME``, syncs the folder above,
and then replaces the file ``latest``, which is synced before, too. Whatever the moment at which
a process or the machine dies, ``latest`` names a complete checkpoint, and the old ones are there.
"""

import contextlib
import hashlib
import json
import mmap
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from graphfsdp.checkpoint.members import Members
from graphfsdp.errors import CheckpointDamagedError, CheckpointError, ConfigError, first_line

Json = Any

MANIFEST = "manifest.json"  # a list of files with their checksums, and all that is no tensor
LATEST = "latest"
_FORMAT, _VERSION = "graphfsdp checkpoint", 3
_UNFINISHED = ".unfinished-"
_DELETED = ".deleted-"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


class Entry(NamedTuple):
    step: int
    attempt: int  # 0, or more where the same step was saved again
    name: str


def entries(root: Path) -> list[Entry]:
    """The oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(Entry(int(match[1]), int(match[2] or 0), path.name))
    return sorted(found)


def resolve(path: Path, step: int | None = None) -> Path:
    """Without a step, the one that ``latest`` names."""
    if (path / MANIFEST).is_file() and step is None:
        return path
    known = entries(path)
    if step is not None:
        wanted = f"no checkpoint of step {step}"
        found = [entry.name for entry in known if entry.step == step]
    else:
        latest, name = path / LATEST, None
        try:
            name = latest.read_text(encoding="utf-8", errors="replace").strip()
            wanted = f"no checkpoint {name!r}, which {latest} names"
        except OSError as error:
            wanted = f"no latest checkpoint: {latest} cannot be read ({error.strerror})"
        found = [entry.name for entry in known if entry.name == name]
    if not found:
        steps = ", ".join(dict.fromkeys(str(entry.step) for entry in known))
        there = (
            f"saved there and complete: step={steps}" if steps else "nothing has been saved there"
        )
        raise CheckpointError(f"{path} has {wanted}; {there}")
    return path / found[-1]


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        name: Of its folder in ``root``, once it is complete.
        keep_last: How many of the newest steps up to this one stay; None keeps all.
    """

    root: Path
    name: str
    step: int
    keep_last: int | None

    @property
    def folder(self) -> Path:
        return self.root / f"{_UNFINISHED}{self.name}"

    def commit(
        self,
        facts: Mapping[str, Json],
        everyone: Sequence[tuple[dict[str, str], dict[str, Json]]],
    ) -> Path:
        """Make it visible, on rank 0, when all files are synced; see Note [Order of a save].

        ``everyone``: the digests of files by name, and what a rank has apart, of each rank.
        """
        files = {name: digest for digests, _ in everyone for name, digest in digests.items()}
        for name in files:
            if not (self.folder / name).exists():
                raise CheckpointError(
                    f"{self.folder / name} was written by its rank, but rank 0 does not see it. "
                    "Remedy: a folder on a file system that all machines share"
                )
        content = {
            **facts,
            "step": self.step,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "ranks": [own for _, own in everyone],
            "files": files,
        }
        digest = hashlib.sha256(_dump(content)).hexdigest()
        form = {"format": _FORMAT, "version": _VERSION, "sha256_of_body": digest}
        with explained(self.root):
            _write_synced(self.folder / MANIFEST, _dump({**form, "body": content}))
            sync(self.folder)
            os.rename(self.folder, self.root / self.name)
            sync(self.root)
            pointer = self.root / f"{LATEST}.new"
            _write_synced(pointer, f"{self.name}\n".encode())
            os.replace(pointer, self.root / LATEST)
            sync(self.root)
        self._remove_old()
        return self.root / self.name

    def give_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_old(self) -> None:
        """Later steps stay: who went back to an earlier one must not lose it for others.

        Those may be damaged; they go when the run has passed their steps. Failing to remove is no
        failure of the save: what is left is removed the next time.
        """
        known = entries(self.root)
        steps = sorted({entry.step for entry in known if entry.step < self.step}, reverse=True)
        kept = steps if self.keep_last is None else steps[: self.keep_last - 1]
        for entry in known:
            again = entry.step == self.step and entry.name != self.name
            if again or (entry.step < self.step and entry.step not in kept):
                with contextlib.suppress(OSError):
                    # Renamed first, so that a half-removed one is never taken for a checkpoint.
                    doomed = self.root / f"{_DELETED}{entry.name}"
                    os.rename(self.root / entry.name, doomed)
                    shutil.rmtree(doomed)


def begin(root: Path, step: int | None, keep_last: int | None) -> Unfinished:
    """Make the folder of a save; without a step, of one more than the last.

    What earlier saves have left unfinished is removed, so one job at a time may save here.
    ConfigError: a number cannot be used.
    """
    for name, value, minimum in (("step", step, 0), ("keep_last", keep_last, 1)):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= minimum):
            raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    with explained(root):
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            if path.name.startswith((_UNFINISHED, _DELETED)):
                shutil.rmtree(path, ignore_errors=True)
        known = entries(root)
        if step is None:
            step = known[-1].step + 1 if known else 0
        attempts = [entry.attempt + 1 for entry in known if entry.step == step]
        name = f"step-{step:08d}" + (f".{max(attempts)}" if attempts else "")
        begun = Unfinished(root, name, step, keep_last)
        begun.folder.mkdir()
    return begun


@contextlib.contextmanager
def explained(root: Path) -> Iterator[None]:
    """Say of a failure of the file system what was to be done, and that nothing is lost."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        where = getattr(error, "filename", None) or root
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"the checkpoint cannot be written: {where}: {why}. Checkpoints "
            f"that are complete in {root} are untouched"
        ) from error


def _write_synced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Have a file or a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, which may not be empty.

    Mapped: one call hashes all of it while another thread writes the next file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def check_files(folder: Path, digests: Mapping[str, str], members: Members) -> None:
    """Read every file once, each on one of the ranks; what one of them finds, all raise."""
    mine = []
    for name in sorted(digests)[members.rank :: members.size]:
        try:
            if digest_of(folder / name) != digests[name]:
                mine.append(f"{name}: the checksum differs")
        except (OSError, ValueError) as error:
            mine.append(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})")
    found = [line for lines in members.gather(mine) for line in lines]
    if found:
        listed = "\n".join(f"  {line}" for line in found)
        raise CheckpointDamagedError(
            f"the checkpoint {folder} is damaged; nothing was loaded:\n{listed}\n"
            "Remedy: load an earlier one (step=...), or copy this one anew"
        )


def read_manifest(folder: Path) -> dict[str, Json]:
    """CheckpointDamagedError: it is not what was written; CheckpointError: it is not there."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
        form, version = document["format"], int(document["version"])
        digest, body = document["sha256_of_body"], document["body"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {first_line(error)}") from None
    if version != _VERSION:
        raise CheckpointError(
            f"{path} has the format of version {version}; this release reads version {_VERSION}. "
            "Remedy: the release that has saved it; weights and moments of version 2, which "
            "graphfsdp 0.2 has saved, are read by torch's HuggingFaceStorageReader too"
        )
    if form != _FORMAT or hashlib.sha256(_dump(body)).hexdigest() != digest:
        raise CheckpointDamagedError(f"{path} is damaged: its checksum differs")
    found: dict[str, Json] = body
    return found


def _dump(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
