"""Programs that end at their limit, and with them all that they have started.

A rank that hangs holds a GPU, and what its parent writes into: so at the end of a program its whole
session is killed, what was written is read from a file, and nobody waits for a process that cannot
be killed, as one deep in a driver.
"""

import os
import pathlib
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

ROOT = pathlib.Path(__file__).resolve().parent.parent
KILLED_S = 10.0  # for the system to end what was killed


def run_limited(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str],
    *,
    grace_s: float = 0.0,
) -> tuple[int | None, str]:
    """Return the exit code, None past the limit, and all that was written.

    With ``grace_s`` the program gets a Ctrl-C at the limit and so long to report.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = wait(process, limit_s)
            if code is None and grace_s:
                process.send_signal(signal.SIGINT)
                wait(process, grace_s)
        finally:
            with suppress(ProcessLookupError):  # it was alone
                os.killpg(process.pid, signal.SIGKILL)
            wait(process, KILLED_S)
        output.seek(0)
        return code, output.read()


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
