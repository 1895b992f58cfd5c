"""Measures a case in a process of its own, and goes on without what takes that process down."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

from graphfsdp.bench.case_child import EXIT_CONFIG, PREFIX, ChildRequest, result_path
from graphfsdp.bench.measure import Say
from graphfsdp.bench.record_files import from_data, to_json
from graphfsdp.bench.records import REFERENCE, CaseResult, MemoryRecord
from graphfsdp.errors import GraphFSDPError

T = TypeVar("T")
# A contender that says nothing for so long hangs; compiling a large model takes minutes.
SILENCE_LIMIT_S = 300.0
_END_LIMIT_S = 60.0
_POLL_S = 1.0
_TAIL = 2000
_STOPPED = "stopped"


class CaseFailedError(GraphFSDPError):
    """A case has no result at all; the message says why."""


@dataclasses.dataclass(frozen=True)
class _Ending:
    """How a child ended: the contender that it was at, and what happened to it."""

    contender: str
    reason: str
    returncode: int


def run_case(request: ChildRequest, say: Say, limit_s: float) -> CaseResult:
    """Measure a case in a fresh process.

    A contender that ends the process is left out, with the reason, and the others start anew.

    Raises:
        CaseFailedError: the case cannot be measured, or not within ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left_s = deadline - time.monotonic()
        found = _run_child(dataclasses.replace(request, limit_s=left_s), CaseResult, say, deadline)
        if isinstance(found, CaseResult):
            return found
        if found.returncode == EXIT_CONFIG or not found.contender or found.contender == REFERENCE:
            raise CaseFailedError(found.reason)
        if time.monotonic() >= deadline:
            raise CaseFailedError(f"{found.reason} (at {found.contender})")
        excluded = (*request.excluded, (found.contender, found.reason))
        request = dataclasses.replace(request, excluded=excluded)


def run_memory(request: ChildRequest, limit_s: float) -> MemoryRecord | None:
    """Measure the memory of the request's one contender; None where that does not work."""
    request = dataclasses.replace(request, memory=True)
    deadline = time.monotonic() + limit_s
    found = _run_child(request, MemoryRecord, lambda phase, name, share: None, deadline)
    return found if isinstance(found, MemoryRecord) else None


def child_command(request: Path) -> list[str]:
    """Return the command line of a child."""
    return [sys.executable, "-m", "graphfsdp.bench.case_child", str(request)]


def _run_child(request: ChildRequest, kind: type[T], say: Say, deadline: float) -> T | _Ending:
    with tempfile.TemporaryDirectory(prefix="graphfsdp-bench-") as folder:
        path, errors = Path(folder) / "request.json", Path(folder) / "errors"
        path.write_text(to_json(request), encoding="utf-8")
        with (
            errors.open("wb") as sink,
            subprocess.Popen(
                child_command(path),
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            ) as child,
        ):
            at, stopped = "", ""
            try:
                for phase, name, share in _messages(child, deadline):
                    if phase == _STOPPED:
                        stopped = name
                        break
                    at = name
                    say(phase, name, share)
                else:
                    _wait(child)
            finally:  # also after Ctrl-C
                _end_group(child)
        target = result_path(path)
        if not stopped and child.returncode == 0 and target.exists():
            return from_data(kind, json.loads(target.read_text(encoding="utf-8")), "child's result")
        tail = errors.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
    return _Ending(at, stopped or _how(child.returncode, tail), child.returncode)


def _messages(child: subprocess.Popen[str], deadline: float) -> Iterator[tuple[str, str, float]]:
    """Yield what the child tells; at last (_STOPPED, why, 0) if it must not go on."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert child.stdout is not None
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    heard = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= deadline:
            yield _STOPPED, "stopped: the time for this case was over", 0.0
            return
        if now >= heard + SILENCE_LIMIT_S:
            yield _STOPPED, f"stopped: no progress for {SILENCE_LIMIT_S:.0f} s", 0.0
            return
        # Processes that the child has started may hold its output open after its end.
        ended = child.poll() is not None
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            if ended:
                return
            continue
        if line is None:
            return
        if line.startswith(PREFIX):
            heard = time.monotonic()
            phase, name, share = json.loads(line.removeprefix(PREFIX))
            yield phase, name, share


def _read(output: IO[str], lines: "queue.Queue[str | None]") -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _wait(child: subprocess.Popen[str]) -> None:
    """Wait for a child that has nothing more to say."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_END_LIMIT_S)


def _end_group(child: subprocess.Popen[str]) -> None:
    """End the child and whatever it has started, compilers for example; the group is theirs."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.poll() is None:
        child.kill()


def _how(returncode: int, tail: str) -> str:
    """Say how a process ended."""
    if returncode == EXIT_CONFIG:
        return tail
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = str(-returncode)
        return f"its process was ended by signal {name}"
    last = tail.splitlines()[-1] if tail else "no message"
    return f"its process ended with exit code {returncode}: {last}"
