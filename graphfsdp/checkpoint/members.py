"""Ranks that save, load or train together: what they tell each other, shared failures."""

from collections.abc import Callable, Sequence
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
        everyone = self.gather(None if failure is None else as_ours(failure))
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
        """Run something on the first rank; return on all what it has made."""
        everyone: list[Any] = self.gather(self.together(lambda: make() if self.rank == 0 else None))
        made: T = everyone[0]
        return made

    def share_out(self, mine: T, make: Callable[[list[T]], Sequence[T]]) -> T:
        """Return this rank's part of what the first one makes of what every rank has given."""
        if self.group is None:
            return make([mine])[0]
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, everyone, group=self.group, group_dst=0)
        parts = self.together(lambda: None if everyone is None else list(make(everyone)))
        found: list[Any] = [None]
        dist.scatter_object_list(found, parts, group=self.group, group_src=0)
        part: T = found[0]
        return part


def as_ours(failure: Exception) -> GraphFSDPError:
    if isinstance(failure, GraphFSDPError):
        return failure
    return CheckpointError(f"{type(failure).__name__}: {failure}")
