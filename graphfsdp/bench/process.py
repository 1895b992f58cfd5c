"""Processes that end at a limit, with all that they have started; a case that runs in one.

A process that hangs holds a GPU, and what its parent writes into: so at its end its whole session
is killed, what was written is read from a file, and nobody waits for what cannot be killed, as one
deep in a driver.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import graphfsdp
from graphfsdp.bench.contenders import Setting
from graphfsdp.bench.measure import NUM_THREADS, measure_case
from graphfsdp.bench.results import Row
from graphfsdp.errors import ConfigError, GraphFSDPError

# A contender whose turn is no shorter hangs; compiling a large model takes minutes.
SILENCE_LIMIT_S = 300
_KILLED_S = 10.0  # for the system to end what was killed


class CaseFailedError(GraphFSDPError):
    """A case has no result at all; the message says why."""


def run_limited(
    command: Sequence[str],
    limit_s: float | None,
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    grace_s: float = 0.0,
) -> tuple[int | None, str]:
    """Run a program in a folder; return its exit code, None past the limit, and all it has written.

    With ``grace_s`` the program gets a Ctrl-C at the limit and so long to report.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
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
        finally:  # also after Ctrl-C
            with suppress(ProcessLookupError):  # it was alone
                os.killpg(process.pid, signal.SIGKILL)
            wait(process, _KILLED_S)
        output.seek(0)
        return code, output.read()


def wait(process: subprocess.Popen[bytes], limit_s: float | None) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


def environment_with_this_package() -> dict[str, str]:
    """A checkout that is not installed is found by its processes, wherever they are started."""
    root = str(Path(graphfsdp.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_case(setting: Setting) -> list[Row]:
    """CaseFailedError: it cannot be measured, not within its limit, or a contender ended it."""
    with tempfile.TemporaryDirectory(prefix="graphfsdp-bench-") as name:
        folder = Path(name)
        (folder / "setting").write_bytes(pickle.dumps(setting))
        (folder / "turn").touch()
        command = [sys.executable, "-m", "graphfsdp.bench.process", name]
        code, said = run_limited(command, setting.limit_s, environment_with_this_package())
        if not (folder / "answer").exists():
            turn = (folder / "turn").read_text()
            remedy = f" in the turn of {turn}: name the others with --contender" if turn else ""
            raise CaseFailedError(f"{_how(code, said)}{remedy}")
        answer: list[Row] | ConfigError = pickle.loads((folder / "answer").read_bytes())
        if isinstance(answer, ConfigError):
            raise CaseFailedError(str(answer))
        return answer


def _how(exit_code: int | None, said: str) -> str:
    if exit_code is None:
        return "the time for this case was over"
    if exit_code == -signal.SIGALRM:
        return f"there was no progress for {SILENCE_LIMIT_S} s"
    if exit_code < 0:
        return f"its process was ended by signal {signal.Signals(-exit_code).name}"
    return f"its process ended with exit code {exit_code} ({last_line(said)})"


def child_main(name: str) -> None:
    """Measure the case of a folder; leave there whose turn it is, then lines or a ConfigError."""
    folder = Path(name)

    def turn(contender: str) -> None:
        (folder / "turn").write_text(contender)
        signal.alarm(SILENCE_LIMIT_S)  # ends this process, whatever it is in

    turn("")
    torch.set_num_threads(NUM_THREADS)
    answer: object
    try:
        answer = measure_case(pickle.loads((folder / "setting").read_bytes()), turn)
    except ConfigError as error:
        answer = ConfigError(str(error))
    (folder / "unfinished").write_bytes(pickle.dumps(answer))
    os.replace(folder / "unfinished", folder / "answer")


if __name__ == "__main__":
    child_main(sys.argv[1])
