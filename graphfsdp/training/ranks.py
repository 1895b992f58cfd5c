"""The processes that train together: which one this is, their process group, common decisions."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.collectives import all_gather_, all_reduce_, broadcast_
from graphfsdp.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: Number of this process.
        size: How many there are.
        local_rank: Number of this process on its machine.
        local_size: How many there are on its machine.
        launched: They were started together, so there is a process group, also of one rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @property
    def is_first(self) -> bool:
        """This process is the one that prints and writes."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of every rank's value, as a new tensor; a collective."""
        value = value.detach().clone()
        if self.launched:
            all_reduce_(value, self._group, reduction="mean")
        return value

    def gather(
        self,
        part: Tensor,  # [N], as long on every rank
    ) -> Tensor:  # [size, N]
        """Return every rank's values; a collective."""
        if not self.launched:
            return part[None]
        whole = part.new_empty(self.size * part.numel())
        all_gather_(whole, part.contiguous(), self._group)
        return whole.view(self.size, -1)

    def copy_first(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0; a collective.

        One seed draws the same weights on equal machines alone: vector units round differently.
        """
        if self.launched:
            for tensor in model.state_dict().values():
                broadcast_(tensor, self._group)

    def decide(self, make: Callable[[], T]) -> T:
        """Run what may fail on one rank only; if it does, every rank raises the same words.

        A rank that went on alone would wait for the others until the time limit.

        Raises:
            ConfigError: ``make`` raised it on some rank.
        """
        made: list[T] = []
        failure = None
        try:
            made.append(make())
        except ConfigError as error:
            failure = error
        said = self._exchange(None if failure is None else str(failure))
        failed = {rank: text for rank, text in enumerate(said) if text is not None}
        if failure is not None and len(failed) == self.size:
            raise failure
        for rank, text in failed.items():
            raise ConfigError(f"rank {rank}: {text}")
        return made[0]

    def refuse_differences(self, facts: Mapping[str, object]) -> None:
        """Check that every rank is about to train the same thing.

        Args:
            facts: What must be equal, by a name for messages.

        Raises:
            ConfigError: a fact differs between two ranks; on every rank with the same words.
        """
        first, *others = self._exchange(dict(facts))
        for rank, theirs in enumerate(others, start=1):
            for name, value in first.items():
                if theirs[name] != value:
                    raise ConfigError(
                        f"rank {rank} has {name} {theirs[name]}, rank 0 has {value}; all ranks "
                        f"train one model on one corpus: start them with the same flags and data"
                    )

    def _exchange(self, mine: Any) -> list[Any]:
        everyone = [mine] * self.size
        if self.launched:
            dist.all_gather_object(everyone, mine)
        return everyone

    @property
    def _group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None  # launched, so inside process_group()
        return group


def find_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return what the launcher has told this process.

    Raises:
        ConfigError: there are several processes, but no launcher told them who they are.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environment]
    if not missing:
        local_size = environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])
        return Ranks(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_size=int(local_size),
            launched=True,
        )
    num_processes = environment.get("WORLD_SIZE", "1")
    if num_processes != "1":
        raise ConfigError(
            f"WORLD_SIZE is {num_processes}, but {', '.join(missing)} is not set, so "
            f"{num_processes} equal copies would be trained; start them with torchrun "
            f"--nproc-per-node {num_processes} -m graphfsdp train ..."
        )
    return Ranks()


@contextmanager
def process_group(
    ranks: Ranks, device: torch.device, *, timeout_minutes: int
) -> Iterator[str | None]:
    """Join the other processes while the body runs; yields the backend, None if there is none.

    Whatever holds a captured graph must be closed inside: it holds the group's communicators.
    """
    if not ranks.launched:
        yield None
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        # Python objects travel through gloo, which does not disturb a stream that is recorded.
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device if on_gpu else None,
    )
    try:
        yield "nccl" if on_gpu else "gloo"
    finally:
        dist.destroy_process_group()
