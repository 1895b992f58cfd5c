"""Failures of torch.distributed.checkpoint as errors of ours, the same on all ranks."""

import contextlib
import re
import warnings
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from graphfsdp.checkpoint.members import Members, as_ours

# torch says so each time that one process without a group saves or loads.
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"
_FILTER = ("ignore", re.compile(_ALONE, re.IGNORECASE), UserWarning, None, 0)


@contextlib.contextmanager
def dcp_errors(members: Members) -> Iterator[None]:
    """Raise what failed on any rank, named, on all; what is no Exception only where it was."""
    # For good: a thread that saves must not set the filters of all threads for a while.
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", _ALONE, UserWarning)
    try:
        yield
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
        mine = failures.get(members.rank)
        if mine is not None and not isinstance(mine, Exception):
            raise mine from None  # such as Ctrl-C
        told = {rank: as_ours(failure) for rank, failure in failures.items()}
        rank, first = next(iter(told.items()))
        if len(told) == members.size and len({str(failure) for failure in told.values()}) == 1:
            raise first from mine
        raise type(first)(f"rank {rank}: {first}") from mine
