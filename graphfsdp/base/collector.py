"""Keeps the cyclic garbage collector out of recordings and measurements."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 1  # generation: what was made since the last long look at everything


@contextmanager
def without_collector(generation: int = 2) -> Iterator[None]:
    """Collect now, up to a generation, and then not before the body is over.

    Whatever a finaliser does in the middle of a recording would become a part of the graph: an
    operator of a user's ``__del__`` would run in every replay, and freeing CUDA memory is not
    permitted in a capture. Into a measurement it would come at any time.

    A whole collection walks over all that torch has imported: a tenth of a second.
    """
    gc.collect(generation)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
