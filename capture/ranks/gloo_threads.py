"""Waits until gloo's threads have let go of what the last collectives used."""

import time
from collections.abc import Iterator
from pathlib import Path

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PAUSE_S = 0.001
_LIMIT_S = 1.0
_NUM_LOOKS = 2


def await_gloo_threads() -> None:
    """Return when gloo's worker threads have nothing left to do.

    Note [Gloo at exit]: gloo's worker threads drop the tensors of a collective a little after
    ``wait`` has returned. A tensor that Python has let go of already needs Python's lock for that.
    If Python is being taken apart by then, it ends the thread in the middle of C++ code that must
    not be left so, and the process dies of SIGABRT ("terminate called without an active
    exception"). So whoever is the last to use a process group waits here, while Python is whole.

    On Linux the threads are looked at; elsewhere this waits a few milliseconds.
    """
    deadline = time.monotonic() + _LIMIT_S
    num_idle = 0
    while num_idle < _NUM_LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)  # gives them Python's lock
        num_idle = num_idle + 1 if all(state == "S" for state in _states()) else 0


def _states() -> Iterator[str]:
    """Yield the scheduler's letter for each worker thread: S sleeps until there is work."""
    for stat in _TASKS.glob("*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:  # the thread has ended
            continue
        if head.partition("(")[2] == _NAME:
            yield rest.split()[0]
