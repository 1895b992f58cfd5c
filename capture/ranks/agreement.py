"""Ranks that share a model keep an iteration together or not at all."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphfsdp._capture.ranks.collective_order import breaks_group
from graphfsdp.errors import CaptureError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05


class WarmUpAgainError(Exception):
    """Another rank wants this attempt undone and repeated, with one more warm-up before it."""


class Agreement:
    """The ranks' exchange about warm-ups and captures.

    A rank that captured while another did not would wait for ever in the first collective of its
    replay; one that stepped while another rolled back would train another model. So each rank
    tells the others how its attempt ended.

    Note [Agreement through the store]: the ranks talk through the group's key-value store and not
    by a collective. A rank that failed in the middle of an iteration cannot take part in one: the
    others are still in a collective of the iteration, with which it would be mixed up. They come
    out of theirs at its timeout, or at once when the failed process ends, and then find the cause
    in the store.

    Note [Agreement over a mesh]: where ranks share the model in groups along several axes of a
    mesh, they settle along one axis after the other, and a rank that finds a failure along one
    tells it along all. So no rank gets past the last axis unless every rank of the mesh has come
    as far, and every rank hears of a failure, also if it shares no group with the rank that failed.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Prepare; talks to nobody.

        Args:
            groups: The ranks that share the model, a group for each axis of their mesh, in the
                same order on every rank; none if it lies on one rank only.
        """
        once = dict.fromkeys(group for group in groups if group.size() > 1)
        self._channels = [_Channel(group) for group in once]
        self._num_attempts = 0
        self._attempt = ""
        self._stage = 0

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part."""
        return bool(self._channels)

    def begin(self, name: str | None = None) -> None:
        """Start an attempt; every rank makes the same ones.

        Args:
            name: Tells this attempt from all others where some rank may leave it out.
        """
        if name is None:
            self._num_attempts += 1
        self._attempt, self._stage = name or str(self._num_attempts), 0

    def settle(self, *, again: bool = False) -> bool:
        """Wait until every rank has come as far as this one.

        Args:
            again: This rank wants the attempt undone and repeated.

        Returns:
            Whether any rank wants that; all of them get the same answer.

        Raises:
            CaptureError: another rank failed; the message names it and says why.
        """
        key = self._next_key()
        for channel in self._channels:
            failed, again = channel.wait(key, again=again)
            if failed is not None:
                raise self._failure(key, failed)
        return again

    def repeat(self, error: BaseException) -> BaseException:
        """Propose to all ranks to repeat an attempt: none does unless all do.

        Args:
            error: Why.

        Returns:
            A WarmUpAgainError, or what another rank has failed of.
        """
        try:
            self.settle(again=True)
        except CaptureError as failure:
            return failure
        return WarmUpAgainError(str(error))

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers.

        Raises:
            CaptureError: another rank failed.
        """
        key = self._next_key()
        for channel in self._channels:
            failed, number = channel.least(key, number)
            if failed is not None:
                raise self._failure(key, failed)
        return number

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one gave up; waits for nobody.

        Raises:
            CaptureError: this rank failed in a collective because another had failed before.
        """
        earlier = self._tell(self._next_key(), error)
        if earlier is None:
            return
        if breaks_group(error):
            raise CaptureError(
                f"{earlier}. So this rank waited in vain, and the process group is of no use "
                "any more; parameters, buffers, gradients and optimizer state are as they "
                "were before. Remedy: mend the cause, and start all ranks again"
            ) from error
        error.add_note(f"graphfsdp: {earlier}")

    def explain(self, error: BaseException, call: int) -> None:
        """Exchange causes after a failed replay, in whose collectives the other ranks may be.

        Args:
            error: What this rank raises; a note is added if another rank failed before it.
            call: Number of the call that replayed, the same on all ranks.
        """
        earlier = self._tell(f"replay{call}", error)
        if earlier is not None:
            error.add_note(f"graphfsdp: {earlier}")

    def _failure(self, key: str, failed: str) -> CaptureError:
        for channel in self._channels:
            channel.tell(key, failed)
        return CaptureError(
            f"{failed}. So no rank keeps this iteration; everything is as it was before"
        )

    def _tell(self, key: str, error: BaseException) -> str | None:
        """Tell all ranks why this one failed; return what one that failed earlier has said."""
        text = f"{type(error).__name__}: {error}"
        mine = f"{_this_rank()} failed: {text}"
        earlier = None
        for channel in self._channels:
            first = channel.tell(key, earlier or mine)
            # Where all ranks fail alike, each has its own error to tell.
            if first is not None and first.partition(": ")[2] != text:
                earlier = earlier or first
        return earlier

    def _next_key(self) -> str:
        self._stage += 1
        return f"{self._attempt}/{self._stage}"


class _Channel:
    """The part of one group's store that belongs to one captured step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._prefix = ""

    def wait(self, key: str, *, again: bool) -> tuple[str | None, bool]:
        """Wait for all ranks; return which one failed and why, and whether any says "again"."""
        store = self._store()
        key = self._key(key)
        if again:
            store.set(f"{key}/again", "yes")
        if store.add(f"{key}/count", 1) == self._group.size():
            store.set(f"{key}/done", "all")
        pause = _FIRST_PAUSE_S
        deadline = time.monotonic() + _timeout(self._group).total_seconds()
        while not store.check([f"{key}/done"]):
            if time.monotonic() > deadline:
                return "some rank has not answered within the process group's timeout", again
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if store.check([f"{key}/failure"]):
            return bytes(store.get(f"{key}/failure")).decode(), again
        return None, bool(store.check([f"{key}/again"]))

    def least(self, key: str, number: int) -> tuple[str | None, int]:
        """Wait for all ranks; return which one failed and why, and the least of their numbers."""
        store, prefix = self._store(), self._key(f"{key}/number")
        store.set(f"{prefix}/{self._group.rank()}", str(number))
        failed, _ = self.wait(key, again=False)
        if failed is None:
            number = min(int(store.get(f"{prefix}/{i}")) for i in range(self._group.size()))
        return failed, number

    def tell(self, key: str, mine: str) -> str | None:
        """Tell of a failure unless another was told of before; return which one counts."""
        try:
            store, key = self._store(), self._key(key)
            first = bytes(store.compare_set(f"{key}/failure", "", mine)).decode()
            store.set(f"{key}/done", "failed")
        except (RuntimeError, ValueError):  # the group is destroyed, or the store's host is gone
            return None
        return first

    def _store(self) -> Any:
        return dist.distributed_c10d._get_process_group_store(self._group)

    def _key(self, key: str) -> str:
        if not self._prefix:
            # The n-th step on one rank is the n-th on every rank; the store counts for us.
            number = self._store().add(f"graphfsdp/steps/{self._group.rank()}", 1)
            self._prefix = f"graphfsdp/step{number}"
        return f"{self._prefix}/{key}"


def _this_rank() -> str:
    try:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    except (RuntimeError, ValueError):  # the process group is destroyed; nobody will hear it
        return "this rank"


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    for device_type in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device_type))
            timeout: datetime.timedelta = backend.options._timeout
        except (AttributeError, RuntimeError):  # no backend for this device, or none with options
            continue
        return timeout
    return dist.distributed_c10d.default_pg_timeout
