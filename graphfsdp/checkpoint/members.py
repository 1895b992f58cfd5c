"""Ranks that save, load or train together: what they tell each other, shared failures."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from graphfsdp.errors import CheckpointError, GraphFSDPError

T = TypeVar("T")

# torch says so each time that one process without a group saves or loads.
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"
_FILTER = ("ignore", re.compile(_ALONE, re.IGNORECASE), UserWarning, None, 0)


@dataclass(frozen=True)
class Members:
    """The ranks of a group; None is a single process."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @staticmethod
    def find(group: dist.ProcessGroup | None = None) -> "Members":
        """Return the members of a group, or of the default one, or this process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return Members()
        found = group or dist.group.WORLD
        return Members(found, dist.get_rank(found), dist.get_world_size(found))

    def gather(self, mine: T) -> list[T]:
        """Return what every rank has given; a collective."""
        everyone: list[Any] = [mine] * self.size
        if self.group is not None:
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def together(self, make: Callable[[], T]) -> T:
        """Run something on every rank; if it fails on one, it fails on all, with equal words.

        What is no error of ours is raised as it is on its own rank: a user's state_dict() may
        raise anything, while the others wait.
        """
        made: list[T] = []
        failure: Exception | None = None
        try:
            made.append(make())
        except Exception as error:
            failure = error
        everyone = self.gather(None if failure is None else _as_ours(failure))
        failed = {rank: what for rank, what in enumerate(everyone) if what is not None}
        if not failed:
            return made[0]
        if failure is not None and not isinstance(failure, GraphFSDPError):
            raise failure
        self._raise(failed, failure)

    def first(self, make: Callable[[], T]) -> T:
        made = self.together(lambda: make() if self.rank == 0 else None)
        found = self.gather(made)[0]
        assert found is not None
        return found

    @contextlib.contextmanager
    def dcp_errors(self) -> Iterator[None]:
        """Raise what failed in torch.distributed.checkpoint on any rank, named, on all.

        What is no Exception, such as Ctrl-C, is raised only where it was.
        """
        # Here: who trains decides together with Members, and may never save.
        from torch.distributed.checkpoint.api import CheckpointException

        # For good: a thread that saves must not set the filters of all threads for a while.
        if _FILTER not in warnings.filters:
            warnings.filterwarnings("ignore", _ALONE, UserWarning)
        try:
            yield
        except CheckpointException as error:
            failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
            mine = failures.get(self.rank)
            if mine is not None and not isinstance(mine, Exception):
                raise mine from None
            self._raise({rank: _as_ours(failure) for rank, failure in failures.items()}, mine)

    def _raise(self, failed: dict[int, GraphFSDPError], mine: BaseException | None) -> NoReturn:
        rank, first = next(iter(failed.items()))
        if len(failed) < self.size or len({str(failure) for failure in failed.values()}) > 1:
            raise type(first)(f"rank {rank}: {first}") from mine
        if isinstance(mine, GraphFSDPError):
            raise mine
        raise first from mine


def _as_ours(failure: BaseException) -> GraphFSDPError:
    if isinstance(failure, GraphFSDPError):
        return failure
    return CheckpointError(f"{type(failure).__name__}: {failure}")
