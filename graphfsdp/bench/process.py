"""Measures a case in a process of its own, and goes on without what takes that process down."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from graphfsdp.bench.contenders import Setting
from graphfsdp.bench.measure import NUM_THREADS, Turn, measure_case
from graphfsdp.bench.results import REFERENCE, Row
from graphfsdp.errors import ConfigError, GraphFSDPError

# A contender that says nothing for so long hangs; compiling a large model takes minutes.
SILENCE_LIMIT_S = 300.0
_TAIL = 2000


class CaseFailedError(GraphFSDPError):
    """A case has no result at all; the message says why."""


def run_case(setting: Setting, turn: Turn = lambda _: None) -> list[Row]:
    """A contender that ends the process is left out, with the reason; the others start anew.

    Raises CaseFailedError where the case cannot be measured, or not within its limit.
    """
    deadline = time.monotonic() + setting.limit_s
    while True:
        found = _run_child(setting, turn, deadline)
        if isinstance(found, list):
            return found
        if isinstance(found, ConfigError):
            raise CaseFailedError(str(found))
        assert isinstance(found, tuple)
        contender, reason = found
        if not contender or contender == REFERENCE:
            raise CaseFailedError(reason)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise CaseFailedError(f"{reason} (at {contender})")
        excluded = {**setting.excluded, contender: reason}
        setting = dataclasses.replace(setting, excluded=excluded, limit_s=left_s)


def child_main(tells: Connection, log: str, setting: Setting) -> None:
    """Measure; tell whose turn it is, then the lines or a ConfigError."""
    # A session of its own, so that what it starts, compilers for example, can be ended with it.
    os.setsid()
    with open(log, "wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    torch.set_num_threads(NUM_THREADS)
    answer: object
    try:
        answer = measure_case(setting, lambda name: tells.send((name,)))
    except ConfigError as error:
        answer = ConfigError(str(error))
    tells.send(answer)


def _run_child(setting: Setting, turn: Turn, deadline: float) -> object:
    """Return what was measured, or the contender that the child was at and how it ended."""
    context = multiprocessing.get_context("spawn")
    hears, tells = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="graphfsdp-bench-") as folder:
        log = Path(folder) / "log"
        log.touch()
        child = context.Process(target=child_main, args=(tells, str(log), setting))
        child.start()
        tells.close()
        at = ""
        try:
            while True:
                message = _next_message(hears, child, deadline)
                match message:
                    case None:
                        child.join()
                        break
                    case str():
                        return at, message
                    case (str(name),):
                        at = name
                        turn(name)
                    case _:
                        return message
        finally:  # also after Ctrl-C
            _end_group(child)
            hears.close()
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
    assert child.exitcode is not None
    return at, _how(child.exitcode, tail)


def _next_message(hears: Connection, child: BaseProcess, deadline: float) -> object:
    """Return what the child tells, a sentence if it must not go on, None if it has ended."""
    silent_until = time.monotonic() + SILENCE_LIMIT_S
    left_s = min(deadline, silent_until) - time.monotonic()
    # Processes that the child has started may hold its end of the pipe open after its own end.
    if not wait([hears, child.sentinel], max(left_s, 0.0)):
        if deadline <= silent_until:
            return "stopped: the time for this case was over"
        return f"stopped: no progress for {SILENCE_LIMIT_S:.0f} s"
    try:
        return hears.recv() if hears.poll() else None
    except EOFError:
        return None


def _end_group(child: BaseProcess) -> None:
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()


def _how(exit_code: int, tail: str) -> str:
    if exit_code < 0:
        return f"its process was ended by signal {signal.Signals(-exit_code).name}"
    last = tail.splitlines()[-1] if tail else "no message"
    return f"its process ended with exit code {exit_code}: {last}"
