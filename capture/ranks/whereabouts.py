"""Where ranks are when one has failed: on their way out of the same call, or out of reach.

Note [Out of reach]: a rank that has failed waits for the others to come out of the call. How long
that takes is no matter of a fixed time: one may still be recording, on a machine that is busy with
other things. So each rank's listening thread looks where its rank is. If it has issued more
collectives than the one that failed, and so waits for it in one, or if it has left the call without
an error, it says at once that all is lost. If not, it gives a sign of life. Given up is also who
gives none, or has not even begun the call, for a while.

Messages between two ranks are counted by pair, since the ranks of a pipeline send and receive
unequal numbers of them; one that its rank did not wait for before it failed does not count, since
the other may never get it.

What a driver only records does not count: no rank waits in it, however much of it one has issued
before it failed.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from graphfsdp._capture.ranks.group_ends import backends_of
from graphfsdp.base.collectives import Interruptible, interruptible
from graphfsdp.base.rank_agreement import RankStore
from graphfsdp.base.torch_internals import all_groups

_PAUSE_S = 0.01
_ASKED, _LOST, _SIGNS = "asked", "lost", "signs"


class Whereabouts:
    """Where this rank is, for the others to know.

    Attributes:
        name: Of the present call, or of the last one; the same on all ranks.
        calls: How many calls of each kind have begun.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._is_inside = False
        # Of which calls with an error; all of them, since the listening thread may be late to look
        # at a question to which the answer was given some calls ago.
        self._came_out: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.name = ""
        # By group: what was issued before there was anything to keep together, and what has only
        # been recorded; of the latter, ranks may have issued more or fewer.
        self._left_out = Counter(self._counts() if store.is_shared else ())
        self._waits: Interruptible | None = None
        self._before: dict[str, int] | None = None  # the recording that is under way
        self._at_end: dict[str, int] | None = None  # of the last call, if it has sent messages

    def enter(self, kind: str, waits: Interruptible) -> None:
        self._waits = waits
        if self._at_end is not None:  # somebody's own messages in between, unequal by rank
            now = self._counts()
            self._left_out.update({name: now[name] - self._at_end.get(name, 0) for name in now})
        number = self.calls[kind] + 1
        self.name, self._is_inside = f"{kind} {number}", True
        self.calls[kind] = number  # last: from now on the listening thread answers for this call

    def leave(self) -> None:
        self._is_inside = False
        if self._waits is not None:
            sent, self._waits.by_gloo = self._waits.by_gloo, Counter()
            self._left_out.update(sent)
            self._at_end = self._counts() if sent else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Leave out the collectives and messages that the body issues, which do not run."""
        self._before = before = self._counts()
        ask = self._waits.ask if self._waits is not None else lambda: None
        try:
            with interruptible(ask):  # it counts the messages, and is forgotten
                yield
        finally:
            now = self._counts()
            self._left_out.update({name: now[name] - before.get(name, 0) for name in now})
            self._before = None

    def come_out(self, silent_s: float) -> bool:
        """Wait for all ranks to come out of the present call with an error, as this one has.

        False if some rank does not, or has issued other collectives; see Note [Out of reach].
        """
        store, issued = self._store, self._issued(has_failed=True)
        self._came_out.add(self.name)
        store.put(f"{self.name}/out/{dist.get_rank()}", json.dumps(issued))
        store.put(_ASKED, json.dumps([self.name, dist.get_rank(), issued]))
        outs = [f"{self.name}/out/{rank}" for rank in store.ranks]
        num_signs, since = 0, time.monotonic()
        while not store.has(outs):
            before, num_signs = num_signs, store.count(_SIGNS, 0)
            since = time.monotonic() if num_signs != before else since
            if store.has([_LOST]) or time.monotonic() - since > silent_s:
                return False
            time.sleep(_PAUSE_S)
        return not store.has([_LOST]) and _are_in_step(map(store.get, outs))

    def answer(self) -> None:
        """Say where this rank is, if one has failed; for the thread that listens."""
        asked = self._store.get(_ASKED)
        if asked is None:
            return
        name, failed, theirs = json.loads(asked)
        kind, _, number = name.rpartition(" ")
        if self.calls[kind] < int(number):
            return
        is_inside = self._is_inside and self.name == name
        if name in self._came_out:  # asked for last: it comes before the end of the call
            return
        mine = self._issued()
        # Of messages that it has not begun it tells nothing.
        pairs = [] if self._waits is None else self._waits.begun.copy()
        theirs = {_key(*pair): 0 for pair in pairs if failed in pair[1:]} | theirs
        if is_inside and all(mine.get(group, 0) <= count for group, count in theirs.items()):
            self._store.count(_SIGNS, 1)
        else:
            self._store.put_first(_LOST, self._store.get(f"{name}/failure") or name)

    def _issued(self, *, has_failed: bool = False) -> dict[str, int]:
        """Return how many collectives of these ranks this one has issued, by group.

        And how many messages it has exchanged with each other rank in this call.
        """
        counts = self._counts() if self._before is None else self._before
        waits = self._waits or Interruptible(lambda: None)
        sent = self._left_out + waits.by_gloo
        issued = {name: count - sent[name] for name, count in counts.items()}
        messages = (waits.ended if has_failed else waits.begun).copy()
        return issued | {_key(*pair): count for pair, count in messages.items()}

    def _counts(self) -> dict[str, int]:
        ranks = set(self._store.ranks)
        return {
            group.group_name: int(backend._get_sequence_number_for_group())
            for group in all_groups()
            if ranks.issuperset(dist.get_process_group_ranks(group))
            for backend in backends_of(group)
        }


def _key(group: str, one: int, other: int) -> str:
    return f"{group}/{one}/{other}"


def _are_in_step(told: Iterator[str | None]) -> bool:
    """Tell whether ranks have issued equally many collectives in the groups that they share."""
    counts: dict[str, set[int]] = {}
    for text in told:
        for name, count in json.loads(text or "{}").items():
            counts.setdefault(name, set()).add(count)
    return all(len(found) == 1 for found in counts.values())
