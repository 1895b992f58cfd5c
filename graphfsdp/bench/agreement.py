"""Ranks that measure together: their group, what to leave out, how long to measure."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from graphfsdp.bench.contenders import ContenderSpec, Setting
from graphfsdp.training.ranks import Ranks, process_group

T = TypeVar("T")
TIMEOUT_MINUTES = 30
_MAX_CHARACTERS = 3000


@dataclass(frozen=True)
class Failure:
    """Why something did not work, on some rank: a sentence, and the end of the traceback."""

    reason: str
    detail: str

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> "Failure":
        where = "" if rank is None else f"rank {rank}: "
        text = " ".join(str(error).split("\n\n")[0].split())
        if len(text) > 400:
            text = text[:400] + " ..."
        name = type(error).__name__
        lines = without_folders("".join(traceback.format_exception(error)))
        return cls(f"{where}{name}: {text}", lines[-_MAX_CHARACTERS:])


def without_folders(text: str) -> str:
    """Return a traceback with files as Python finds them: results go to other people."""
    folders = {os.getcwd(), sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(os.path.join(folder, ""), "")
    return text


def attempt(make: Callable[[], T], ranks: Ranks) -> T | Failure:
    """Run what may fail; where it fails on any rank, every rank gets the failure.

    A rank that went on alone would wait for the others in its next collective.
    """
    failure: Failure | None = None
    made: list[T] = []
    try:
        made.append(make())
    except Exception as error:  # whatever a contender dies of is a result: it could not run here
        failure = Failure.of(error, ranks.rank if ranks.size > 1 else None)
    failures = [found for found in ranks.exchange(failure) if found is not None]
    return failures[0] if failures else made[0]


def line_up(ranks: Ranks, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if ranks.size > 1:
        dist.barrier()


@contextlib.contextmanager
def group_for(specs: Sequence[ContenderSpec], setting: Setting) -> Iterator[None]:
    """Keep a group of one rank where a contender needs one and no launcher has made any."""
    if dist.is_initialized() or not any(spec.needs_group for spec in specs):
        yield
        return
    alone = Ranks(launched=True)
    with process_group(alone, setting.device, timeout_minutes=TIMEOUT_MINUTES, store=HashStore()):
        yield
