"""What fails on one rank fails on all: told before the others wait in a collective for ever.

Note [Agreement through the store]: ranks talk through the key-value store of the process group and
not by a collective. A rank that failed in the middle of an iteration cannot take part in one: the
others are still in a collective of the iteration, with which it would be mixed up.
"""

import datetime
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from graphfsdp.base.torch_internals import backend_of
from graphfsdp.errors import ConfigError, GraphFSDPError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05


class RankStore:
    """The part of the store that belongs to the ranks of some groups; all of them make it alike.

    By it they go on together or not at all.

    ``groups``: one of each axis that this rank is in, in the same order on every rank.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup], purpose: str) -> None:
        """Talk to nobody yet; the n-th store of a purpose on one rank is the n-th on all."""
        self.groups = tuple(dict.fromkeys(group for group in groups if group.size() > 1))
        self.is_shared = bool(self.groups)
        self._purpose = purpose
        self._prefix = ""
        self._ranks: list[int] = []
        self._num_stages = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks, by number in the world; asked for first, it may wait for the others."""
        if not self._ranks:
            ranks = sorted(self._connected())
            digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
            prefix = f"graphfsdp/{self._purpose}/{digest}"
            self._prefix = f"{prefix}/{_store().add(f'{prefix}/uses/{dist.get_rank()}', 1)}"
            self._ranks = ranks
        return self._ranks

    def _connected(self) -> set[int]:
        """Return the members of the groups, of their groups, and so on."""
        members = {group.group_name: dist.get_process_group_ranks(group) for group in self.groups}
        known = {rank for ranks in members.values() for rank in ranks}
        if len({frozenset(ranks) for ranks in members.values()}) == 1:
            return known
        for name in members:  # each rank tells what other groups the members of a group are in
            _store().set(f"graphfsdp/peers/{name}/{dist.get_rank()}", json.dumps(members))
        asked, waiting = set(), dict(members)
        while waiting:
            name, ranks = waiting.popitem()
            asked.add(name)
            known.update(ranks)
            for rank in ranks:
                theirs = json.loads(bytes(_store().get(f"graphfsdp/peers/{name}/{rank}")))
                waiting.update({key: theirs[key] for key in theirs if key not in asked})
        return known

    def name_of(self, rank: int) -> str:
        return f"rank {rank} of {dist.get_world_size()}"

    def put(self, key: str, text: str) -> None:
        _store().set(self._key(key), text)

    def put_first(self, key: str, text: str) -> str:
        """Put a text unless there is one; return the one that is there then."""
        return bytes(_store().compare_set(self._key(key), "", text)).decode()

    def get(self, key: str) -> str | None:
        """Return a text, None if there is none; does not wait."""
        return bytes(_store().get(self._key(key))).decode() if self.has([key]) else None

    def has(self, keys: Iterable[str]) -> bool:
        return bool(_store().check([self._key(key) for key in keys]))

    def count(self, key: str, num_more: int) -> int:
        """Count on by so many, all ranks together; return the count."""
        return int(_store().add(self._key(key), num_more))

    def _key(self, key: str) -> str:
        assert self.ranks  # which sets the prefix
        return f"{self._prefix}/{key}"

    @property
    def timeout_s(self) -> float:
        """How long a collective of the groups waits for a rank."""
        return min(timeout_of(group).total_seconds() for group in self.groups)

    def exchange(
        self, mine: str, *, stage: str = "", heard: Callable[[], None] = lambda: None
    ) -> dict[int, str]:
        """Wait until every rank has come as far; return by rank what each has told.

        ``stage`` names the exchange where ranks may have made different numbers of them; ``heard``
        is called now and then, and may raise. GraphFSDPError: a rank has not come within the
        process group's timeout.
        """
        if not self.is_shared:
            return {_global_rank(): mine}
        if not stage:
            self._num_stages += 1
            stage = str(self._num_stages)
        keys = {rank: f"{stage}/{rank}" for rank in self.ranks}
        self.put(keys[_global_rank()], mine)
        pause, deadline = _FIRST_PAUSE_S, time.monotonic() + self.timeout_s
        while not self.has(keys.values()):
            heard()
            if time.monotonic() > deadline:
                raise GraphFSDPError(
                    "some rank has not answered within the process group's timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return {rank: self.get(key) or "" for rank, key in keys.items()}

    def go_on(self, failure: BaseException | None) -> None:
        """Every rank must call it; if one has failed, all raise, and name the ranks.

        ConfigError if some rank has failed with one, else GraphFSDPError.
        """
        answers = self.exchange("" if failure is None else _told(failure))
        told = {rank: json.loads(text) for rank, text in answers.items() if text}
        if not told:
            return
        texts = {text for _, text in told.values()}
        message = "; ".join(f"rank {rank}: {told[rank][1]}" for rank in sorted(told))
        if len(texts) == 1 and len(told) == len(answers):
            message = texts.pop()
        kind = ConfigError if all(is_config for is_config, _ in told.values()) else GraphFSDPError
        raise kind(message) from failure

    def refuse_differences(self, what: str, mine: Sequence[str]) -> None:
        """ConfigError if a list of names is not the same on every rank; all must call it."""
        told = self.exchange(json.dumps(list(mine)))
        first = min(told)
        expected = json.loads(told[first])
        for rank in sorted(told):
            theirs = json.loads(told[rank])
            if theirs != expected:
                extra = sorted(set(theirs) ^ set(expected)) or ["another order"]
                raise ConfigError(
                    f"rank {rank} has other {what} than rank {first}: {_few(extra)}. Remedy: "
                    "build and load the same model on every rank"
                )


def _told(failure: BaseException) -> str:
    is_ours = isinstance(failure, GraphFSDPError)
    text = str(failure) if is_ours else f"{type(failure).__name__}: {failure}"
    return json.dumps([isinstance(failure, ConfigError), text])


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def put_first(key: str, value: object) -> Any:
    """Put what JSON can hold under a key, unless there is something; return what is there then."""
    found = _store().compare_set(f"graphfsdp/{key}", "", json.dumps(value))
    return json.loads(bytes(found))


def take_back(key: str) -> None:
    """Forget what was put under a key."""
    _store().delete_key(f"graphfsdp/{key}")


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return how long a group's collectives wait for a rank."""
    for device_type in ("cpu", "cuda"):
        try:
            backend = backend_of(group, device_type)
            timeout: datetime.timedelta = backend.options._timeout
        except (AttributeError, RuntimeError):  # no backend for this device, or none with options
            continue
        return timeout
    return dist.distributed_c10d.default_pg_timeout
