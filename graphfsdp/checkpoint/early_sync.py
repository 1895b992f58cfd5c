"""Lets the disk begin while a file is still being written."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO, Self

# Less would be many small requests, more would leave the disk idle at first.
_INTERVAL_BYTES = 16 << 20


class EarlySync:
    """Syncs what a file holds so far, from a thread, while more of it is written.

    Left alone, the system keeps what is written in memory, and the one sync at the end waits for
    all of it. It stays necessary: this only leaves it less to do. A context manager.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Prepare to sync a file that is open for writing."""
        self._file = file
        self._num_new_bytes = 0
        self._threads = ThreadPoolExecutor(1, "graphfsdp-sync")  # starts one when it has work
        self._running: Future[None] | None = None

    def wrote(self, num_bytes: int) -> None:
        """Note what was written; begins a sync when it is much and none is under way.

        Raises:
            OSError: the sync before has failed.
        """
        self._num_new_bytes += num_bytes
        if self._num_new_bytes < _INTERVAL_BYTES or not hasattr(os, "fdatasync"):
            return
        if self._running is not None:
            if not self._running.done():
                return
            self.finish()
        self._num_new_bytes = 0
        self._running = self._threads.submit(os.fdatasync, self._file.fileno())

    def finish(self) -> None:
        """Wait for the sync that is under way.

        A failure is told to one sync only: the last one would not see it again.

        Raises:
            OSError: it has failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown()
