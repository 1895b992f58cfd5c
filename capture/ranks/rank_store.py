"""The key-value store of all ranks that share a model, over whichever groups they do."""

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class RankStore:
    """The part of a store that belongs to one captured step; all ranks open it together.

    Attributes:
        size: Ranks that share the model.
        ranks: These, by number in the world.
        name: This rank, in words.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Prepare; talks to nobody.

        Args:
            groups: Those that this rank shares the model in, maybe one for each axis of a mesh.
        """
        self._groups = list(groups)
        self._store: Any = None
        self._prefix = ""
        self.size = 1
        self.ranks: list[int] = []
        self.name = ""

    def open(self) -> None:
        """Find all ranks: the members of the groups, and of their groups, and so on."""
        peers = {frozenset(dist.get_process_group_ranks(group)) for group in self._groups}
        me = dist.get_rank()
        if len(peers) == 1:
            self._store = dist.distributed_c10d._get_process_group_store(self._groups[0])
            known = set(next(iter(peers)))
        else:
            self._store = dist.distributed_c10d._get_default_store()
            known = self._closure(me, set().union(*peers))
        # The n-th step on one rank is the n-th on every rank; the store counts for us.
        number = self._store.add(f"graphfsdp/watches/{me}", 1)
        self._prefix = f"graphfsdp/watch{min(known)}/{number}"
        self.ranks = sorted(known)
        self.size = len(known)
        self.name = self.name_of(me)

    def _closure(self, me: int, peers: set[int]) -> set[int]:
        number = self._store.add(f"graphfsdp/peers/{me}", 1)
        self._store.set(f"graphfsdp/peers/{me}/{number}", json.dumps(sorted(peers)))
        known, waiting = {me}, peers - {me}
        while waiting:
            other = waiting.pop()
            known.add(other)
            # Waits for the other rank.
            theirs = json.loads(bytes(self._store.get(f"graphfsdp/peers/{other}/{number}")))
            waiting |= set(theirs) - known
        return known

    def name_of(self, rank: int) -> str:
        """Return what people call a rank."""
        return f"rank {rank} of {dist.get_world_size()}"

    def put(self, key: str, text: str) -> None:
        """Put a text."""
        self._store.set(f"{self._prefix}/{key}", text)

    def put_first(self, key: str, text: str) -> str:
        """Put a text unless there is one; return the one that is there then."""
        return bytes(self._store.compare_set(f"{self._prefix}/{key}", "", text)).decode()

    def get(self, key: str) -> str | None:
        """Return a text, None if there is none; does not wait."""
        key = f"{self._prefix}/{key}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def add(self, key: str, number: int) -> int:
        """Add to a number; return the sum."""
        return int(self._store.add(f"{self._prefix}/{key}", number))

    def leave(self) -> None:
        """Tell the others that this rank answers no more."""
        try:
            self.add("left", 1)
        except (RuntimeError, ValueError):  # the group is destroyed; nobody asks
            return

    @property
    def num_left(self) -> int:
        """Ranks that answer no more."""
        return self.add("left", 0)
