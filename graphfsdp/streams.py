"""Fork to a stream and join back; the same words do nothing on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forked(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Run the body on ``stream``, ordered after the current stream and before what follows.

    Args:
        stream: The stream to fork to; None (a CPU) runs the body where it is.

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


__all__ = ["forked"]
