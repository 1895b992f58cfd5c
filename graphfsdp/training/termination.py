"""Last words of a process that a launcher or a batch system ends with SIGTERM."""

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class LastWords:
    """Runs a function once when SIGTERM comes, then ends the process. A context manager.

    Python's own handlers run between two lines of Python, so they are late where the main thread
    waits for other ranks or for the GPU, which is where launchers end it: when another rank has
    failed. So a thread waits for the signal.

    It does nothing outside the main thread, which alone may handle signals, and where the program
    has its own handler.
    """

    def __init__(self, speak: Callable[[], None]) -> None:
        self._speak = speak
        self._pipe: tuple[int, int] | None = None
        self._old_wakeup_fd = -1

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._old_wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            # Without a handler in Python the process ends before anything is written to the pipe.
            signal.signal(signal.SIGTERM, _leave_to_thread)
            threading.Thread(target=self._wait, name="last words", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pipe is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self._old_wakeup_fd)
            os.close(self._pipe[1])  # which ends the thread

    def _wait(self) -> None:
        assert self._pipe is not None
        while signals := os.read(self._pipe[0], 64):
            if signal.SIGTERM in signals:
                try:
                    self._speak()
                finally:
                    os._exit(128 + signal.SIGTERM)  # as a shell reports it
        os.close(self._pipe[0])


def _leave_to_thread(number: int, frame: object) -> None:
    """The thread ends the process; until then the main thread goes on."""
