"""Ranks that save, load or train together: what they tell each other, shared failures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from graphfsdp.errors import CheckpointError, GraphFSDPError

T = TypeVar("T")


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
        told = failure
        if failure is not None and not isinstance(failure, GraphFSDPError):
            told = as_ours(failure)
        failed = {rank: what for rank, what in enumerate(self.gather(told)) if what is not None}
        if not failed:
            return made[0]
        equal = len(failed) == self.size and len({str(what) for what in failed.values()}) == 1
        if failure is not None and (equal or failure is not told):
            raise failure
        rank, first = next(iter(failed.items()))
        raise type(first)(f"rank {rank}: {first}") from failure

    def first(self, make: Callable[[], T]) -> T:
        made = self.together(lambda: make() if self.rank == 0 else None)
        found = self.gather(made)[0]
        assert found is not None
        return found


def as_ours(failure: BaseException) -> GraphFSDPError:
    if isinstance(failure, GraphFSDPError):
        return failure
    return CheckpointError(f"{type(failure).__name__}: {failure}")
