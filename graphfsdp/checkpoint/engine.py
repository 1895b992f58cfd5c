"""Runs torch.distributed.checkpoint over the ranks of a group, or alone, with our errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_together
from torch.distributed.checkpoint.state_dict_saver import save as save_together

from graphfsdp.checkpoint.parts import NamedPart
from graphfsdp.checkpoint.planner import PartLoadPlanner, PartSavePlanner
from graphfsdp.checkpoint.reader import FolderReader
from graphfsdp.checkpoint.writer import FolderWriter
from graphfsdp.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Members:
    """The ranks that save or load together.

    Attributes:
        group: Their group; None for a single process.
        rank: This one, among them.
        size: How many there are.
    """

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

        Raises:
            CheckpointError: or the child of it that ``make`` raised on the first such rank. What
                else it raised is raised as it is on its own rank.
        """
        made: list[T] = []
        failure = None
        other: Exception | None = None
        try:
            made.append(make())
        except CheckpointError as error:
            failure = error
        except Exception as error:  # a user's state_dict() may raise anything; the others wait
            other = error
            failure = CheckpointError(f"{type(error).__name__}: {error}")
        said = self.gather(failure)
        if other is not None:
            raise other
        failed = {rank: what for rank, what in enumerate(said) if what is not None}
        if not failed:
            return made[0]
        if failure is not None and len({str(what) for what in failed.values()}) == 1:
            raise failure
        rank, first = next(iter(failed.items()))
        raise type(first)(f"rank {rank}: {first}")

    def first(self, make: Callable[[], T]) -> T:
        """Run something on rank 0 and return its result on every rank; a collective."""
        made = self.together(lambda: make() if self.rank == 0 else None)
        found = self.gather(made)[0]
        assert found is not None
        return found


def run_save(parts: Sequence[NamedPart], writer: FolderWriter, members: Members) -> None:
    """Write every rank's parts.

    Raises:
        CheckpointError: some rank could not; it says which and why.
    """
    planner = PartSavePlanner(parts)
    try:
        if members.group is None:
            planner.set_up_planner({}, None, is_coordinator=True)
            plans, metadata = planner.create_global_plan([planner.create_local_plan()])
            written = writer.write_data(planner.finish_plan(plans[0]), planner)
            writer.finish(metadata, [written.value()])
        else:
            save_together({}, storage_writer=writer, planner=planner, process_group=members.group)
    except CheckpointException as error:
        raise _translate(error, "written") from error
    except OSError as error:
        raise _os_error(error, "written") from error


def run_load(parts: Sequence[NamedPart], reader: FolderReader, members: Members) -> None:
    """Check, then fill every rank's parts; where something is damaged, no rank fills any.

    Raises:
        CheckpointError: some rank could not; it says which and why.
    """
    planner = PartLoadPlanner(parts)
    try:
        if members.group is None:
            planner.set_up_planner({}, reader.read_metadata(), is_coordinator=True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            reader.read_data(plan, planner)
        else:
            load_together({}, storage_reader=reader, planner=planner, process_group=members.group)
    except CheckpointException as error:
        raise _translate(error, "read") from error
    except OSError as error:
        raise _os_error(error, "read") from error


def _translate(error: CheckpointException, what: str) -> CheckpointError:
    """Return the first rank's failure as ours; all ranks get the same."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, CheckpointError):
        prefix = "" if rank == 0 else f"rank {rank}: "
        return type(cause)(f"{prefix}{cause}")
    if isinstance(cause, OSError):
        return _os_error(cause, what, rank)
    return CheckpointError(f"the checkpoint cannot be {what}: rank {rank}: {cause!r}")


def _os_error(error: OSError, what: str, rank: int | None = None) -> CheckpointError:
    who = "" if rank is None else f"rank {rank}: "
    where = f"{error.filename}: " if error.filename else ""
    return CheckpointError(
        f"the checkpoint cannot be {what}: {who}{where}{error.strerror or error}. Those that were "
        "complete before are untouched"
    )
