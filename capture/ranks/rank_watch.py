"""Tells every rank at once when one of them cannot take part in a replay."""

import dataclasses
import enum
import json
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from graphfsdp._capture.ranks.gloo_threads import await_gloo_threads
from graphfsdp._capture.ranks.rank_store import RankStore
from graphfsdp._capture.trace.backend import Effect
from graphfsdp.errors import (
    BatchMismatchError,
    GraphFSDPError,
    GuardError,
    RankFailedError,
    broken,
)

_LOG = logging.getLogger("graphfsdp")

_SHORTEST_PAUSE_S = 0.02
_PAUSE_S_PER_RANK = 0.001  # all ranks together ask the store a thousand times in a second
_PATIENCE_S = 10.0
_ROLL_CALL_S = 1.0
# In a sum of answers, so many stand for one rank that is in the replay, or in the next one.
_IN_IT = 1 << 20
_IN_THE_NEXT = 1 << 40
GROUP_IS_LOST = (
    "The process group is of no use any more. Remedy: mend the cause, and start all ranks again"
)
_INSIDE, _OUTSIDE = "inside", "outside"


class TogetherError(RankFailedError):
    """Another rank has no graph for this call: all run it eagerly, and settle how it ended."""


_RAISED_BY_ALL = (BatchMismatchError, GuardError, TogetherError)


class Stage(enum.Enum):
    """How far a replay had come when its rank failed."""

    BEFORE = "before"  # every rank can undo it
    AFTER = "after"  # other ranks may have updated their weights
    LOST = "lost"  # in a collective, which has broken the process group


@dataclasses.dataclass(frozen=True)
class Failure:
    """One rank's failure, as all ranks hear of it.

    Attributes:
        call: Number of the call that it happened in, the same on all ranks.
        stage: How far the replay had come.
        rank: Who, in words.
        kind: Name of the error's class.
        text: The error's message.
        number: Of the failures of this step.
    """

    call: int
    stage: Stage
    rank: str
    kind: str
    text: str
    number: int = 0

    @property
    def is_call(self) -> bool:
        """Whether nothing has failed, but a rank wants all to run the call eagerly."""
        return self.kind == TogetherError.__name__

    @property
    def breakage(self) -> str:
        """Why the other ranks cannot go on: weights differ, or there is no group any more."""
        return f"{self}. {GROUP_IS_LOST if self.stage is Stage.LOST else Effect.PART.value}"

    def tells_of(self, error: BaseException) -> bool:
        """Tell whether an error of this rank's says the same."""
        return (self.kind, self.text) == (type(error).__name__, str(error))

    def error(self) -> GraphFSDPError:
        """Return what the other ranks raise: of the same class where they may expect it."""
        known = (kind for kind in _RAISED_BY_ALL if kind.__name__ == self.kind)
        kind = next(known, RankFailedError)
        return kind(f"{self}. So no rank has run this replay, and each can go on with its next one")

    def __str__(self) -> str:
        what = "came out of a collective" if self.stage is Stage.LOST else "failed"
        return f"{self.rank} {what}: {self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Where other ranks wait for the one that has failed.

    Attributes:
        in_it: In the replay that failed.
        in_the_next: In the one after it: they had not heard in time.
    """

    in_it: bool = False
    in_the_next: bool = False


@dataclasses.dataclass(frozen=True)
class RollCall:
    """Which ranks live.

    Attributes:
        silent: Those that have not answered.
        outside: Those that have, and are in no replay.
    """

    silent: tuple[str, ...]
    outside: tuple[str, ...]


class RankWatch:
    """One rank's ear for the failures of the others, and its voice.

    Note [Hearing of failures]: a question to the store in each replay would be too dear. So a
    thread asks it every now and then, and a replay looks only at what the thread has heard. A rank
    that fails tells the store, and waits until every rank's thread has answered, with whether the
    rank is in that replay; only then it issues the collectives that those are waiting for (see
    Note [Standing in]). So whoever comes to the gate has heard, without having asked.

    Attributes:
        num_calls: Calls of the step so far, the same number on all ranks.
        lasting: A failure after which no rank can go on; None if there was none.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Prepare; talks to nobody.

        Args:
            groups: The ranks that share the model; none if it lies on one rank only.
        """
        self._groups = [group for group in groups if group.size() > 1]
        self._store: RankStore | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.num_calls = 0
        self._is_inside = False
        self._num_heard = 0
        self._heard: dict[int, Failure] = {}  # by call
        self.lasting: Failure | None = None

    def start(self) -> None:
        """Begin to listen; every rank does it at the same time."""
        if self._thread is not None or not self._groups:
            return
        self._store = RankStore(self._groups)
        self._store.open()
        self._thread = threading.Thread(target=self._listen, name="graphfsdp ranks", daemon=True)
        self._thread.start()

    @property
    def is_listening(self) -> bool:
        """Whether other ranks can be asked."""
        return self._thread is not None

    def stop(self) -> None:
        """Listen no more, and leave gloo's threads idle; idempotent."""
        if self._groups:
            await_gloo_threads()
        thread, self._thread = self._thread, None
        if thread is None or self._store is None:
            return
        self._stop.set()
        self._store.leave()
        thread.join(_PATIENCE_S)

    def next_call(self) -> None:
        """Count a call of the step; every rank makes the same ones."""
        with self._lock:
            self.num_calls += 1
            self._heard = {n: failure for n, failure in self._heard.items() if n >= self.num_calls}

    def enter(self) -> Failure | None:
        """Begin a replay; return the failure that it cannot be run for, if there is one."""
        with self._lock:
            failure = self.lasting or self._heard.get(self.num_calls)
            self._is_inside = failure is None
        return failure

    def leave(self) -> None:
        """End a replay."""
        with self._lock:
            self._is_inside = False

    def gate(self) -> None:
        """Let the replay of this rank go on to update weights, unless another has failed.

        Raises:
            GraphFSDPError: another has; it is named.
        """
        if not self._heard and self.lasting is None:  # nearly always
            return
        failure = self.failure
        if not self._is_inside:
            return
        if failure is not None and failure.stage is not Stage.AFTER:
            raise failure.error()
        if self.lasting is not None and self.lasting.call < self.num_calls:
            raise broken(self.lasting.breakage)

    @property
    def failure(self) -> Failure | None:
        """The failure of another rank in the present call."""
        return self._heard.get(self.num_calls)

    def tell(self, error: BaseException, stage: Stage) -> Failure | None:
        """Tell all ranks that this one has failed in the present call.

        Args:
            error: Why.
            stage: How far the replay had come.

        Returns:
            The failure that all ranks hear of, maybe another rank's; None if nobody listens.
        """
        if self._thread is None or self._store is None:
            return None
        mine = Failure(self.num_calls, stage, self._store.name, type(error).__name__, str(error))
        try:
            while self.num_calls not in self._heard:
                number = self._num_heard
                self._take(number, self._store.put_first(f"{number}/failure", _encode(mine)))
        except (RuntimeError, ValueError):  # the group is destroyed, or the store's host is gone
            return None
        return self._heard[self.num_calls]

    def waiting(self, failure: Failure) -> Waiting:
        """Tell where other ranks wait for this one; returns when all have answered."""
        if self._store is None or self._thread is None:
            return Waiting()
        key = f"{failure.number}/answers"
        deadline = time.monotonic() + _PATIENCE_S + 3 * self._pause_s
        try:
            while time.monotonic() < deadline:
                answers = self._store.add(key, 0)
                if answers % _IN_IT == self._store.size:
                    return Waiting(bool(answers % _IN_THE_NEXT // _IN_IT), answers >= _IN_THE_NEXT)
                if self._store.num_left > 0:
                    break
                time.sleep(_SHORTEST_PAUSE_S / 4)
        except (RuntimeError, ValueError):  # the group is destroyed, or the store's host is gone
            pass
        return Waiting()

    def roll_call(self, failure: Failure) -> RollCall | None:
        """Tell which ranks live; waits a second at most. None if the store does not answer."""
        if self._store is None or self._thread is None:
            return None
        waiting = [self._store.name_of(rank) for rank in self._store.ranks]
        outside = []
        deadline = time.monotonic() + _ROLL_CALL_S + 3 * self._pause_s
        try:
            while waiting and time.monotonic() < deadline:
                told = {name: self._store.get(f"{failure.number}/{name}") for name in waiting}
                waiting = [name for name in waiting if told[name] is None]
                outside += [name for name, where in told.items() if where == _OUTSIDE]
                time.sleep(_SHORTEST_PAUSE_S if waiting else 0)
        except (RuntimeError, ValueError):  # the group is destroyed, or the store's host is gone
            return None
        return RollCall(tuple(waiting), tuple(outside))

    @property
    def _pause_s(self) -> float:
        size = 0 if self._store is None else self._store.size
        return max(_SHORTEST_PAUSE_S, _PAUSE_S_PER_RANK * size)

    def _listen(self) -> None:
        assert self._store is not None
        while not self._stop.wait(self._pause_s):
            try:
                number = self._num_heard
                told = self._store.get(f"{number}/failure")
                if told is not None:
                    self._take(number, told)
            except (RuntimeError, ValueError):  # likewise: there is nothing to hear any more
                return

    def _take(self, number: int, told: str) -> None:
        """Note a failure and answer, once on each rank."""
        assert self._store is not None
        failure = _decode(told, number)
        with self._lock:
            if number != self._num_heard:
                return  # the other thread was quicker
            self._num_heard += 1
            self._heard[failure.call] = failure
            if failure.stage is not Stage.BEFORE:
                self.lasting = failure
            answer = 1
            if self._is_inside:
                answer += _IN_IT if failure.call == self.num_calls else _IN_THE_NEXT
            me = self._store.name
            self._store.put(f"{number}/{me}", _INSIDE if self._is_inside else _OUTSIDE)
            self._store.add(f"{number}/answers", answer)
        if failure.rank != self._store.name:
            _LOG.log(logging.INFO if failure.is_call else logging.ERROR, "%s", failure)


def _encode(failure: Failure) -> str:
    return json.dumps(dataclasses.asdict(failure) | {"stage": failure.stage.value})


def _decode(told: str, number: int) -> Failure:
    fields: dict[str, Any] = json.loads(told)
    return Failure(**fields | {"stage": Stage(fields["stage"]), "number": number})
