"""Which checkpoint to go back to when one is damaged."""

from pathlib import Path

from graphfsdp.checkpoint.folder import entries
from graphfsdp.checkpoint.manifest import read_manifest
from graphfsdp.checkpoint.reader import CheckpointFiles, check_everything
from graphfsdp.errors import CheckpointError


def name_last_good(damaged: Path) -> str:
    """Return a sentence that names the newest earlier checkpoint without damage.

    It is read as a whole, so that nobody is sent from one damaged checkpoint to the next.

    Args:
        damaged: A checkpoint's folder.
    """
    known = entries(damaged.parent)
    names = [entry.name for entry in known]
    earlier = known[: names.index(damaged.name)] if damaged.name in names else known
    for entry in reversed(earlier):
        folder = damaged.parent / entry.name
        try:
            manifest = read_manifest(folder)
            check_everything(CheckpointFiles(folder, manifest), manifest)
        except CheckpointError:
            continue
        return (
            f"The newest one before it is without damage: step={entry.step} of {damaged.parent}, "
            f"or the path {folder}"
            if entry == earlier[-1]
            else f"Of those before it, the newest without damage is step={entry.step} of "
            f"{damaged.parent}, or the path {folder}"
        )
    what = "None of those before it is without damage" if earlier else "There is none before it"
    return f"{what} in {damaged.parent}"
