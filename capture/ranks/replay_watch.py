"""Replays that never end: which rank is missing, and the end of this process.

Note [Replays that never end]: torch's watchdog is told of no collective that is captured, so that
neither the timeout of a process group nor TORCH_NCCL_* acts on a replay. If a rank dies or stands
still, the kernels of the others wait for it for ever, and so does each host at its next read. So an
event is recorded behind each call that ranks make together, and a thread asks for it. When it has
not come within the timeout of the group, the process says who is missing and ends, as torch's
watchdog ends it in eager iterations: nothing else frees a host that waits for its device.

Meanwhile the listening thread of each rank gives signs of life. A rank that is alive but launches
nothing (its Python waits for something else) is told from one that has died or stands still.
"""

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from graphfsdp.base.rank_agreement import RankStore

_LOG = logging.getLogger("graphfsdp")
_PAUSE_S = 0.25
_STUCK_S = 5.0  # after which ranks begin to give signs of life
_SIGNS_S = 2.0  # in which a rank that is alive gives one
_FREE_S = 60.0  # for kernels to leave, behind an abort, on a machine however busy (24 were seen)
_ANSWER_S = 10.0  # for the store, which may be the one that stands still
_STUCK, _SIGNS, _LAUNCHED = "stuck", "life", "launched"
_EXIT_STATUS = 1
_THREAD_LOCAL = 1  # CUstreamCaptureMode


class ReplayWatch:
    """Asks whether the calls that ranks make together come to their ends on this device."""

    def __init__(self, store: RankStore, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._pending: deque[tuple[str, float, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._num_launched = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, call: str) -> None:
        """Note that the work of a call was put on the current stream of the device.

        Capture: outside of it; an event for each call, used again when it has come.
        """
        event = self._free.pop() if self._free else torch.cuda.Event()
        # Whichever device is current: a rank may train on another one.
        event.record(torch.cuda.current_stream(self._device))
        self._num_launched += 1
        self._pending.append((call, time.monotonic(), event))
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(
                target=self._watch, name="graphfsdp replays", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_ANSWER_S)

    def answer(self) -> None:
        """Give a sign of life if some rank waits; for the thread that listens."""
        if self._store.has([_STUCK]):
            me = torch.distributed.get_rank()
            self._store.put(f"{_LAUNCHED}/{me}", str(self._num_launched))
            self._store.count(f"{_SIGNS}/{me}", 1)

    def end_unless_free(self, why: str) -> None:
        """End this process if its device still waits for others behind an abort of all groups.

        torch 2.15 aborts one communicator after the other, and an abort waits for the graphs that
        hold it: one that is under way, and meets others in two communicators, stays in the second.
        """
        deadline = time.monotonic() + _FREE_S
        while not all(event.query() for _, _, event in list(self._pending)):
            if time.monotonic() > deadline:
                self._end(
                    f"graphfsdp: {self._store.name_of(torch.distributed.get_rank())}: {why}. The "
                    "process groups were aborted, and yet the device waits in a collective of a "
                    "graph. Nothing frees a host that waits for it, so this process ends. Remedy: "
                    "mend the cause, start all ranks again, and load the last checkpoint\n"
                )
            time.sleep(_PAUSE_S)

    def _watch(self) -> None:
        _leave_captures_alone()
        timeout_s = self._store.timeout_s
        since, has_asked = time.monotonic(), False
        while not self._stop.wait(_PAUSE_S):
            try:
                while self._pending and self._pending[0][2].query():
                    self._free.append(self._pending.popleft()[2])
                    since = time.monotonic()
            except RuntimeError:  # of a kernel: the next call tells it
                return
            if not self._pending:
                continue
            call, noted, _ = self._pending[0]
            waited_s = time.monotonic() - max(since, noted)
            if waited_s > min(_STUCK_S, timeout_s / 2) and not has_asked:
                has_asked = True
                _run_within(partial(self._store.put, _STUCK, call), _ANSWER_S)
            if waited_s > timeout_s:
                self._give_up(call, timeout_s)

    def _give_up(self, call: str, timeout_s: float) -> None:
        """Say who is missing, and end this process."""
        found: list[str] = []
        _run_within(lambda: found.append(self._missing()), _ANSWER_S)
        if not found:
            found.append(
                "the store of the process group does not answer: the process that hosts it (rank "
                "0, unless a launcher does) has ended or stands still"
            )
        text = (
            f"graphfsdp: {self._store.name_of(torch.distributed.get_rank())}: {call} was launched "
            f"and did not come to its end within the process group's timeout of {timeout_s:g} s: "
            f"{found[0]}. Nothing frees a host whose device waits in a collective of a graph, so "
            "this process ends. Remedy: look at that rank, start all ranks again, load the last "
            "checkpoint; if replays may take longer, init_process_group(timeout=...)\n"
        )
        if not self._stop.is_set():
            self._end(text)

    def _end(self, text: str) -> NoReturn:
        if _LOG.hasHandlers():  # else it would stand on the terminal twice
            _LOG.critical(text.rstrip())
        for stream in (sys.stdout, sys.stderr):
            _run_within(stream.flush, 1.0)
        os.write(2, text.encode())
        os._exit(_EXIT_STATUS)

    def _missing(self) -> str:
        store = self._store
        before = {rank: store.count(f"{_SIGNS}/{rank}", 0) for rank in store.ranks}
        time.sleep(_SIGNS_S)
        silent = [rank for rank in before if store.count(f"{_SIGNS}/{rank}", 0) == before[rank]]
        if silent:
            return f"no sign of life of {' and '.join(map(store.name_of, silent))}"
        launched = {rank: int(store.get(f"{_LAUNCHED}/{rank}") or 0) for rank in store.ranks}
        late = [rank for rank in launched if launched[rank] < max(launched.values())]
        if late:
            return (
                f"{' and '.join(map(store.name_of, late))} lives, but has not launched as much: "
                "its Python waits for something else (data, a lock, a barrier of its own)"
            )
        return (
            "all ranks live and have launched as much, so their devices wait for each other. This "
            "may be a bug of graphfsdp: please report it with step.report()"
        )


def _run_within(function: Callable[[], object], seconds: float) -> None:
    """Call what may hang, and wait so long for it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _leave_captures_alone() -> None:
    """Let this thread ask for events while others capture.

    CUDA rule: while a thread captures in the global mode, torch's default, a thread of that mode
    that asks for an event would break the capture.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
