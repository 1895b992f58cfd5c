"""What goes on where a call takes long, for whoever sits at a terminal."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def shown_when_slow(text: str, after_s: float = 2.0) -> Iterator[None]:
    """Show that the body goes on, where errors go to the first rank's terminal.

    What it shows is gone when the body is over.
    """
    if not sys.stderr.isatty() or (dist.is_initialized() and dist.get_rank()):
        yield
        return
    from rich.console import Console

    shown = Console(stderr=True).status(text)
    # torch's modes and Python's profile hook belong to a thread each: those of this have none.
    beginning = threading.Timer(after_s, shown.start)
    beginning.daemon = True
    beginning.start()
    try:
        yield
    finally:
        beginning.cancel()
        beginning.join()
        shown.stop()
