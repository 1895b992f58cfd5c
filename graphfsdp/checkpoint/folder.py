"""The folder of a run's checkpoints: what is complete is visible, and nothing else.

Note [Order of a save]: every rank writes into ``.unfinished-NAME`` and syncs its files; rank 0
writes and syncs the manifest, syncs the folder, renames it to ``NAME``, syncs the folder above,
and then replaces the file ``latest``, which is synced before, too. Whatever the moment at which
a process or the machine dies, ``latest`` names a complete checkpoint, and the old ones are there.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphfsdp.checkpoint.file_format import file_errors
from graphfsdp.checkpoint.manifest import MANIFEST
from graphfsdp.errors import CheckpointError

LATEST = "latest"
UNFINISHED = ".unfinished-"
_DELETED = ".deleted-"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Entry:
    step: int
    attempt: int  # 0, or more where the same step was saved again
    name: str


def entries(root: Path) -> list[Entry]:
    """The oldest first."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
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
        chosen = [entry for entry in known if entry.step == step]
        if not chosen:
            raise CheckpointError(f"{path} has no checkpoint of step {step}; {_describe(known)}")
        return path / chosen[-1].name
    try:
        name = (path / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise CheckpointError(
            f"{path} is no folder of checkpoints: {path / LATEST} cannot be read ({reason}); "
            f"{_describe(known)}"
        ) from None
    if name not in [entry.name for entry in known]:
        raise CheckpointError(
            f"{path / LATEST} names {name!r}, which is not there; {_describe(known)}"
        )
    return path / name


def _describe(known: list[Entry]) -> str:
    if not known:
        return "nothing has been saved there"
    steps = ", ".join(dict.fromkeys(str(entry.step) for entry in known))
    return f"saved there and complete: step={steps}"


def begin(root: Path, step: int | None) -> tuple[int, str]:
    """Return the step and the final name of the save, whose folder is made.

    What earlier saves have left unfinished is removed, so one job at a time may save here.
    """
    with explained(root):
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            if path.name.startswith((UNFINISHED, _DELETED)):
                shutil.rmtree(path, ignore_errors=True)
        known = entries(root)
        if step is None:
            step = known[-1].step + 1 if known else 0
        attempts = [entry.attempt + 1 for entry in known if entry.step == step]
        name = f"step-{step:08d}" + (f".{max(attempts)}" if attempts else "")
        unfinished(root, name).mkdir()
    return step, name


def unfinished(root: Path, name: str) -> Path:
    return root / f"{UNFINISHED}{name}"


def commit(root: Path, name: str, manifest: bytes, keep_last: int | None) -> None:
    """Make a checkpoint visible, on rank 0, when all files are synced; see Note [Order of a save].

    All but ``keep_last`` of the newest steps up to this one are removed; None keeps all.
    """
    with explained(root):
        folder = unfinished(root, name)
        _write_synced(folder / MANIFEST, manifest)
        _sync_folder(folder)
        os.rename(folder, root / name)
        _sync_folder(root)
        pointer = root / f"{LATEST}.new"
        _write_synced(pointer, f"{name}\n".encode())
        os.replace(pointer, root / LATEST)
        _sync_folder(root)
    _remove_old(root, name, keep_last)


def give_up(root: Path, name: str) -> None:
    shutil.rmtree(unfinished(root, name), ignore_errors=True)


def _remove_old(root: Path, name: str, keep_last: int | None) -> None:
    """Later steps stay: who went back to an earlier one must not lose it for others.

    Those may be damaged; they go when the run has passed their steps. Failing to remove is no
    failure of the save: what is left is removed the next time.
    """
    known = entries(root)
    saved = next(entry for entry in known if entry.name == name)
    old = [entry for entry in known if entry.step == saved.step and entry != saved]
    if keep_last is not None:
        earlier = [entry for entry in known if entry.step < saved.step]
        steps = sorted({entry.step for entry in earlier}, reverse=True)
        kept = set(steps[: keep_last - 1])
        old += [entry for entry in earlier if entry.step not in kept]
    for entry in old:
        with contextlib.suppress(OSError):
            # Renamed first, so that a half-removed one is never taken for a checkpoint.
            doomed = root / f"{_DELETED}{entry.name}"
            os.rename(root / entry.name, doomed)
            shutil.rmtree(doomed)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def explained(root: Path) -> Iterator[None]:
    """Say of a failure of the file system what was to be done, and that nothing is lost."""
    try:
        yield
    except file_errors() as error:
        where = getattr(error, "filename", None) or root
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"the checkpoint cannot be written: {where}: {why}. Checkpoints "
            f"that are complete in {root} are untouched"
        ) from error
