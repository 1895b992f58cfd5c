"""A torch that is newer than what this package was tested with is told of, and used."""

import multiprocessing
import os
import warnings

import torch

NEWEST_TESTED = "2.15"


def warn_if_newer(version: str) -> None:
    """Warn of a newer release, development builds of one too; a patch is none."""
    if _release(version) <= _release(NEWEST_TESTED):
        return
    warnings.warn(
        f"torch {version} is newer than {NEWEST_TESTED}, the newest release that graphfsdp was "
        "tested with. It uses insides of torch, and where these have changed it may raise or be "
        f"wrong. Remedy: torch {NEWEST_TESTED} or older, or a newer graphfsdp; step.verify() "
        "compares replays with eager steps. To go on without this warning, say before the import: "
        "warnings.filterwarnings('ignore', 'torch .* is newer')",
        stacklevel=4,  # at the import of graphfsdp
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


# Once for a program: not in each process that it starts, and not on each rank.
if multiprocessing.parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0":
    warn_if_newer(torch.__version__)
