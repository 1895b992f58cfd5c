"""Ranks that share a model keep an iteration together or not at all.

If one fails, the others hear who and why within seconds, also in a collective.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from graphfsdp._capture.ranks.group_ends import abort_groups, backends_of
from graphfsdp._capture.ranks.replay_watch import ReplayWatch
from graphfsdp.base.collectives import Interruptible, interruptible
from graphfsdp.base.rank_agreement import RankStore
from graphfsdp.base.torch_internals import all_groups
from graphfsdp.errors import CaptureError, ConfigError, RankFailedError

_PAUSE_S = 0.05
_LOOK_S = 0.01
_PAUSE_S_PER_RANK = 0.001  # all ranks together ask the store a thousand times in a second
_CAUSE_S = 1.0  # after a collective's error, for the rank that has caused it to say so
_SILENT_S = 10.0  # that ranks may be after a failure, before the groups are given up
_GRACE_S = 2.0  # the same, where the failure may be the end of another process
_ITERATION = "iteration"  # what a call of the step is called
_AGAIN = "again"
_ASKED, _LOST, _SIGNS = "asked", "lost", "signs"  # keys in the store
# Of gloo's worker threads: their name, where Linux lists them, and how they are waited for.
_GLOO = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_GLOO_PAUSE_S = 0.001
_GLOO_LIMIT_S = 10.0  # of a busy machine; idle threads take milliseconds
_NUM_LOOKS = 2
_ABORTED = (
    "The process groups were aborted. Remedy: mend the cause, start all ranks again, and load the "
    "last checkpoint"
)


class WarmUpAgainError(Exception):
    """A rank wants this attempt undone and repeated, with one more warm-up before it."""


class Ranks:
    """One rank's ear for the others, and its voice.

    A rank that captured while another did not would wait for ever in the first collective of its
    replay; one that stepped while another rolled back would train another model. So in a warm-up
    or a capture each rank waits until all have come as far, or one has failed (``settle``).

    Note [A rank that fails] writes who, why and when into the store. Then it waits for the others
    (Note [Out of reach]): if all come out of the same call, because they failed alike, or have
    heard at the end of a capture, and have issued equally many collectives, the process groups are
    as good as before and training can go on. If not, some rank waits in a collective for one that
    never comes. So the groups are given up: the failing rank says so in the store and aborts its
    groups, a small thread on each other rank, which looks into the store, aborts those, as torch
    does for errors of NCCL, and whoever comes out of a collective finds the reason in the store.

    NCCL's communicators are aborted from any thread. gloo's cannot be (torch 2.13: ``abort``
    returns, and a collective that is under way goes on waiting; only a closed connection, which
    is the end of the other process, or the timeout ends it). So our own collectives wait for gloo
    in slices and ask in between (see Note [Waiting for gloo]); those that the user's code issues
    through torch end when the failed process does. Later ones time out after a second.

    Attributes:
        lost: Why no rank can go on; empty while all is well.
    """

    def __init__(
        self,
        groups: list[dist.ProcessGroup],
        ask: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        """``ask`` is called now and then where this rank waits for others, and may raise.

        ``device``: on which it trains; None is a CPU.
        """
        self.groups = groups
        self._ask = ask
        self._store = RankStore(groups, "iterations")
        self.is_collective = self._store.is_shared
        self.lost = ""
        self._heard = ""  # the failure for which the groups were aborted
        self._whereabouts = Whereabouts(self._store)
        # On a CPU the group's own timeout acts.
        on_gpu = device is not None and device.type == "cuda"
        self._replays = ReplayWatch(self._store, device) if device is not None and on_gpu else None
        self._has_compared = not self.is_collective
        self._num_settled = 0
        self._num_attempted = self._num_replayed = 0  # the last iteration that was
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """Run the body, which all ranks run together; tell them if it fails here."""
        if not self.is_collective:
            yield
            return
        self._num_settled = 0
        try:
            with interruptible(self.check) as waits:
                self._whereabouts.enter(kind, waits)
                self._listen()
                self.check()
                yield
                if self._replays is not None:
                    self._replays.note(self._name)
        except BaseException as error:
            raised = self._ended(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._whereabouts.leave()

    @property
    def _name(self) -> str:
        return self._whereabouts.name

    def check(self) -> None:
        """RankFailedError if the groups were given up."""
        self._ask()
        if self._heard:
            raise RankFailedError(self._heard)

    def refuse_other_options(self, options: Mapping[str, object]) -> None:
        """ConfigError, in the first call, if the rank that came to it first was given others.

        Nobody waits for anybody: whoever is there already hears of the error in its collective.
        """
        if self._has_compared:
            return
        mine = {name: repr(value) for name, value in options.items()}
        first, theirs = json.loads(
            self._store.put_first("options", json.dumps([dist.get_rank(), mine]))
        )
        for name, value in mine.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{self._me} captures with {name}={value}, and rank {first} with "
                    f"{name}={theirs[name]}: their collectives or their numbers would not fit "
                    "together. Remedy: the same arguments of capture on every rank"
                )
        self._has_compared = True

    def settle(self, *, again: bool = False) -> None:
        """Wait until every rank has come as far as this one.

        CaptureError names another rank that failed and says why. RankFailedError: the groups were
        given up as well. WarmUpAgainError: a rank wants the attempt repeated; all ranks raise it.
        """
        self._ask()  # while it can be undone: afterwards the others keep what they have done
        self._num_settled += 1
        told = self._store.exchange(
            _AGAIN if again else "",
            stage=f"{self._name}/{self._num_settled}",
            heard=self._refuse_failure,
        )
        if _AGAIN in told.values():
            raise WarmUpAgainError("a rank was given other numbers than in the warm-up")

    def repeat(self, error: BaseException) -> BaseException:
        """Propose to all ranks to repeat an attempt: none does unless all do.

        Returned is a WarmUpAgainError, or what another rank has failed of.
        """
        try:
            self.settle(again=True)
        except CaptureError as failure:
            return failure
        except WarmUpAgainError:
            return WarmUpAgainError(str(error))
        return error

    def _refuse_failure(self) -> None:
        self.check()
        failed = self._store.get(f"{self._name}/failure")
        if failed is not None:
            raise CaptureError(
                f"{failed}. So no rank keeps this iteration; everything is as it was before"
            )

    def begin_attempt(self) -> None:
        """Say that this iteration is a warm-up or a capture, which ranks make together."""
        if self.is_collective:
            self._num_attempted = self._whereabouts.calls[_ITERATION]
            self._store.put("attempt", str(self._num_attempted))

    def note_replay(self) -> None:
        self._num_replayed = self._whereabouts.calls[_ITERATION]

    def recording(self) -> AbstractContextManager[None]:
        """Run the body, whose collectives a driver records and does not run."""
        return self._whereabouts.recording() if self.is_collective else nullcontext()

    def close(self) -> None:
        """Listen no more, and leave gloo's threads idle; idempotent."""
        if self.is_collective:
            await_gloo_threads()
        if self._replays is not None:
            self._replays.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join(10 * _GRACE_S)

    def _listen(self) -> None:
        if self._thread is None and not self._stop.is_set():
            pause_s = max(_PAUSE_S, _PAUSE_S_PER_RANK * len(self._store.ranks))
            name = "graphfsdp ranks"
            self._thread = threading.Thread(
                target=self._watch, args=(pause_s,), name=name, daemon=True
            )
            self._thread.start()

    def _watch(self, pause_s: float) -> None:
        while not self._stop.wait(pause_s):
            try:
                lost = self._store.get(_LOST)
                attempt = int(self._store.get("attempt") or 0)
                if lost is None and self._num_attempted < attempt <= self._num_replayed:
                    lost = self._store.put_first(_LOST, _other_kinds(self._me, attempt))
                if lost is None:
                    self._whereabouts.answer()
                    if self._replays is not None:
                        self._replays.answer()
            except (RuntimeError, ValueError):  # the group is destroyed, or the host has ended
                return
            if lost is not None:
                self._heard = lost
                abort_groups()
                if self._replays is not None:
                    with suppress(RuntimeError):  # of a kernel: the next call tells it
                        self._replays.end_unless_free(lost)
                return

    def _ended(self, error: BaseException) -> BaseException:
        """Tell of a failure, and hear whether training can go on; return what is to be raised."""
        mine = f"{self._me} failed in {self._name}: {type(error).__name__}: {error}"
        try:
            first = self._meet(error, mine)
        except (RuntimeError, ValueError) as broken:  # no store: the process that hosts it ended
            first = self.lost = (
                f"{mine}; and the store of the process group does not answer: the process that "
                f"hosts it (rank 0, unless a launcher does) has ended ({type(broken).__name__})"
            )
            abort_groups()
        if not self.lost:
            if first not in str(error) and first.partition(": ")[2] != mine.partition(": ")[2]:
                error.add_note(f"graphfsdp: {first}")
            return error
        self.lost = f"{self.lost}. {_ABORTED}"
        if first == mine and self.lost.startswith(mine):
            error.add_note(
                f"graphfsdp: the other ranks could not go on without this one. {_ABORTED}"
            )
            return error
        return RankFailedError(self.lost)

    def _meet(self, error: BaseException, mine: str) -> str:
        """Wait for the other ranks to come out of the call as well; return who failed first."""
        store, me = self._store, dist.get_rank()
        failure = f"{self._name}/failure"
        if _may_follow(error):
            self._until(lambda: store.has([failure]) or store.has([_LOST]), _CAUSE_S)
        first = store.put_first(failure, mine)
        if self._whereabouts.come_out(_GRACE_S if _may_follow(error) else _SILENT_S):
            return first
        first = store.put_first(_LOST, first)
        self._heard = first
        abort_groups()
        store.put(f"left/{me}", "yes")
        left = [f"left/{rank}" for rank in store.ranks]
        self._until(lambda: store.has(left), _GRACE_S)
        ended = [rank for rank in store.ranks if not store.has([f"left/{rank}"])]
        self.lost = first
        if ended and _may_follow(error):
            names = " and ".join(map(store.name_of, ended))
            self.lost = f"{names} ended, or did not answer for {_GRACE_S:g} seconds: {first}"
        return first

    @property
    def _me(self) -> str:
        return self._store.name_of(dist.get_rank())

    def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S / 5)


class Whereabouts:
    """Where this rank is, for the others to know.

    Note [Out of reach]: a rank that has failed waits for the others to come out of the call. How
    long that takes is no matter of a fixed time: one may still be recording, on a machine that is
    busy with other things. So each rank's listening thread looks where its rank is. If it has
    issued more collectives than the one that failed, and so waits for it in one, or if it has left
    the call without an error, it says at once that all is lost. If not, it gives a sign of life.
    Given up is also who gives none, or has not even begun the call, for a while.

    Messages between two ranks are counted by pair, since the ranks of a pipeline send and receive
    unequal numbers of them; one that its rank did not wait for before it failed does not count,
    since the other may never get it.

    What a driver only records does not count: no rank waits in it, however much of it one has
    issued before it failed.

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
            time.sleep(_LOOK_S)
        return not store.has([_LOST]) and _are_in_step(map(store.get, outs))

    def answer(self) -> None:
        """Say where this rank is, if one has failed; for the thread that listens."""
        get = self._store.get
        asked = get(_ASKED)
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
        pairs = [] if self._waits is None else self._waits.begun.copy()
        # Another rank may have failed as well, and asked before; this one may wait for its message.
        for rank in {failed, *(rank for pair in pairs for rank in pair[1:])}:
            issued = theirs if rank == failed else json.loads(get(f"{name}/out/{rank}") or "null")
            if issued is None:
                continue
            # Of messages that it has not begun it tells nothing.
            issued = {_key(*pair): 0 for pair in pairs if rank in pair[1:]} | issued
            is_inside &= all(mine.get(group, 0) <= count for group, count in issued.items())
        if is_inside:
            self._store.count(_SIGNS, 1)
        else:
            self._store.put_first(_LOST, get(f"{name}/failure") or name)

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


def _may_follow(error: BaseException) -> bool:
    """Tell whether an error may come from a collective in which another rank was missing."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError | RankFailedError)


def _other_kinds(name: str, iteration: int) -> str:
    return (
        f"{name} replayed iteration {iteration}, for whose batch another rank has no graph yet; "
        "every rank must see the same kinds of batches in the same calls. Remedy: choose buckets "
        "by a rule that all ranks share, or on_change='eager'"
    )


def await_gloo_threads() -> None:
    """Return when gloo's worker threads have nothing left to do.

    Note [Gloo at exit]: gloo's worker threads drop the tensors of a collective a little after
    ``wait`` has returned. A tensor that Python has let go of already needs Python's lock for that.
    If Python is being taken apart by then, it ends the thread in the middle of C++ code that must
    not be left so, and the process dies of SIGABRT ("terminate called without an active
    exception"). So whoever is the last to use a process group waits here, while Python is whole.

    On Linux the threads are looked at; elsewhere this waits a few milliseconds.
    """
    deadline = time.monotonic() + _GLOO_LIMIT_S
    num_idle = 0
    while num_idle < _NUM_LOOKS and time.monotonic() < deadline:
        time.sleep(_GLOO_PAUSE_S)  # gives them Python's lock
        num_idle = num_idle + 1 if all(state == "S" for state in _gloo_states()) else 0


def _gloo_states() -> Iterator[str]:
    """Yield the scheduler's letter for each worker thread: S sleeps until there is work."""
    for stat in _TASKS.glob("*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:  # the thread has ended
            continue
        if head.partition("(")[2] == _GLOO:
            yield rest.split()[0]
