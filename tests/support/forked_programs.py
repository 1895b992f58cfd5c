"""Programs in processes of their own that start within milliseconds: torch is imported already.

They are forked from the process that the ranks of pools are forked from. What has to begin with an
interpreter that has imported nothing, or to end as one does, needs ``subprocess`` instead.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ranks import fork_server
from time_limits import Limit

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0


class Forked:
    """A function's call in a process of its own; what the call returns is the exit code."""

    def __init__(self, folder: Path, function: Callable[..., Any], *args: Any) -> None:
        self._kept = [folder / "stdout", folder / "stderr"]
        call = (dict(os.environ), self._kept, function, args)
        self._process = fork_server().Process(target=_begin, args=call)
        self._process.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def ended(self, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Wait for the end; return the exit code and what was written."""
        limit = Limit(limit_s)
        while self._process.exitcode is None and (left_s := limit.left_s()):
            self._process.join(left_s)
        code = self._process.exitcode
        out, errors = (path.read_text() if path.exists() else "" for path in self._kept)
        assert code is not None, f"it did not end in {limit_s:g} s: {out}{errors}"
        return subprocess.CompletedProcess([], code, out, errors)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def forked(function: Callable[..., Any], *args: Any) -> Iterator[Forked]:
    """Call ``function``, which lives at module level, in another process; end it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        process = Forked(Path(folder), function, *args)
        try:
            yield process
        finally:
            process.kill()


def run_source(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Do what ``python -c`` does, in the repository's folder."""
    with forked(_source, source, arguments) as process:
        return process.ended()


def run_file(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Do what ``python FILE`` does, in the repository's folder."""
    with forked(run_as_main, path, *arguments) as process:
        return process.ended()


# Forked before the sources run, so that each ends as an interpreter does.
_TO_THEIR_ENDS = """
import os, sys, torch, torch._dynamo, graphfsdp
children = []
for index, source in enumerate(sys.argv[2:]):
    children.append(os.fork())
    if not children[-1]:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{index}.{kind}", os.O_WRONLY | os.O_CREAT), number)
        break
else:
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
    sys.exit()
exec(source)
"""


def run_to_their_ends(folder: Path, *sources: str) -> list[subprocess.CompletedProcess[str]]:
    """Do what ``python -c`` does with each, side by side; torch is imported once for all."""
    command = [sys.executable, "-c", _TO_THEIR_ENDS, str(folder), *sources]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        subprocess.CompletedProcess(
            [], int(code), *((folder / f"{index}.{kind}").read_text() for kind in ("out", "err"))
        )
        for index, code in enumerate(said.stdout.split())
    ]


def _begin(
    environment: dict[str, str],
    kept: list[Path],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Whoever started the tests may ignore Ctrl-C, as a shell's background job does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(kept, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.exit(function(*args))


def _source(source: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), vars(main))


def run_as_main(path: Path, *arguments: str) -> None:
    """Be ``python FILE``, as a process that has been forked."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
