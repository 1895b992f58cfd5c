"""What fails on one rank fails on all: told before the others wait in a collective for ever."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.errors import ConfigError, GraphFSDPError


class RankAgreement:
    """Ranks of a grid, each of whose axes is a process group, that go on together or not at all.

    Attributes:
        groups: A group of each axis that this rank is in, in the same order on every rank.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self.groups = tuple(groups)
        self._device = device

    def go_on(self, failure: BaseException | None) -> None:
        """Go on if no rank has failed; a collective.

        Raises:
            ConfigError: some rank has failed with one; or
            GraphFSDPError: with anything else. Every rank raises, and names the ranks.
        """
        failed = torch.full((1,), float(failure is not None), device=self._device)
        for group in self.groups:  # the second axis spreads what the first has found
            all_reduce_(failed, group, reduction="max")
        if not failed.item():
            return
        said: dict[int, tuple[bool, str]] = {}
        if failure is not None:
            said[_global_rank()] = (isinstance(failure, ConfigError), _words(failure))
        for group in self.groups:
            everyone: list[dict[int, tuple[bool, str]]] = [{} for _ in range(group.size())]
            dist.all_gather_object(everyone, said, group)
            said = {rank: what for part in everyone for rank, what in part.items()}
        raise _together(said) from failure

    def refuse_differences(self, what: str, mine: Sequence[str]) -> None:
        """Check that a list of names is the same on every rank; a collective.

        Args:
            what: It is a list of, for the message.
            mine: This rank's.

        Raises:
            ConfigError: a rank has another one.
        """
        failure = None
        for group in self.groups:
            everyone: list[list[str]] = [[] for _ in range(group.size())]
            dist.all_gather_object(everyone, list(mine), group)
            for place, theirs in enumerate(everyone):
                if theirs != everyone[0] and failure is None:
                    rank = dist.get_global_rank(group, place)
                    first = dist.get_global_rank(group, 0)
                    extra = sorted(set(theirs) ^ set(everyone[0])) or ["another order"]
                    failure = ConfigError(
                        f"rank {rank} has other {what} than rank {first}: {_few(extra)}. Remedy: "
                        "build and load the same model on every rank"
                    )
        self.go_on(failure)


def _together(said: dict[int, tuple[bool, str]]) -> GraphFSDPError:
    """Return one error for what several ranks have met: whether it is of ConfigError, and text."""
    texts = {text for _, text in said.values()}
    if len(texts) == 1 and len(said) == _num_ranks():
        message = texts.pop()
    else:
        message = "; ".join(f"rank {rank}: {said[rank][1]}" for rank in sorted(said))
    kind = ConfigError if all(is_config for is_config, _ in said.values()) else GraphFSDPError
    return kind(message)


def _words(failure: BaseException) -> str:
    if isinstance(failure, GraphFSDPError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
