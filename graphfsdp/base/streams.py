"""Fork to a stream and join back; without a stream, on a CPU, nothing happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@contextmanager
def forked(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Run the body on ``stream``, ordered after the current stream and before what follows.

    Capture: legal inside one. CUDA rule: every stream that forks from a capturing stream must
        join it before the capture ends (error 904 otherwise), hence the wait on the way out.
    """
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@dataclass(frozen=True)
class Lane:
    """Where collectives run while others compute: a side stream, or on a CPU gloo's threads."""

    stream: "torch.cuda.Stream | None" = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Run the body on the lane, ordered after the current stream; nobody waits for it yet.

        Capture: legal inside one if what is begun here is waited for before it ends.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """In a capture, let the current stream wait for all that was begun here in the same one.

        Capture: one dependency at most; outside of captures nothing.
        """
        if self.stream is None or not is_capturing():
            return
        current = torch.cuda.current_stream(self.stream.device)
        with torch.cuda.stream(self.stream):
            has_begun = is_capturing()  # else to wait for it would leave the capture (error 905)
        if has_begun:
            current.wait_stream(self.stream)


def is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
