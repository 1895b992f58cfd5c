"""Ranks that save, load or train together: what they tell each other, shared failures."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

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
        failure: BaseException | None = None
        try:
            made.append(make())
        except (Exception, CheckpointException) as error:
            failure = _own_failure(error, self.rank)
        everyone = self.gather(None if failure is None else _as_ours(failure))
        failed = [(rank, what) for rank, what in enumerate(everyone) if what is not None]
        if not failed:
            return made[0]
        if failure is not None and not isinstance(failure, GraphFSDPError):
            raise failure
        rank, first = failed[0]
        if len(failed) < self.size or len({str(what) for _, what in failed}) > 1:
            raise type(first)(f"rank {rank}: {first}") from failure
        raise failure or first

    def first(self, make: Callable[[], T]) -> T:
        made = self.together(lambda: make() if self.rank == 0 else None)
        found = self.gather(made)[0]
        assert found is not None
        return found

    def call_dcp(
        self, call: Callable[..., object], tensors: dict[str, Tensor], **options: object
    ) -> None:
        """Call save or load of torch.distributed.checkpoint; what fails, fails on all ranks."""
        # For good: a thread that saves must not set the filters of all threads for a while.
        if _FILTER not in warnings.filters:
            warnings.filterwarnings("ignore", _ALONE, UserWarning)
        options |= {"process_group": self.group, "no_dist": self.group is None}
        self.together(lambda: call(tensors, **options))


def _own_failure(error: BaseException, rank: int) -> BaseException | None:
    """Return what has failed on this rank; dcp raises on all ranks what did on any of them."""
    if not isinstance(error, CheckpointException):
        return error
    failure, _ = error.failures.get(rank, (None, None))
    # What is no Exception, such as Ctrl-C, stays what it is.
    return _as_ours(failure) if isinstance(failure, Exception) else failure


def _as_ours(failure: BaseException) -> GraphFSDPError:
    if isinstance(failure, GraphFSDPError):
        return failure
    ours = CheckpointError(f"{type(failure).__name__}: {failure}")
    ours.__cause__ = failure
    return ours
