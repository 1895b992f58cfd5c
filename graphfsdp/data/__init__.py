"""Tokens on their way into a training (docs/data.md): files, their order, copies to a GPU.

Imports nothing of ours but errors. ``Feed`` takes any loader; the rest makes batches of tokens.
"""

from graphfsdp.data.batches import (
    BYTES_VOCAB_SIZE,
    IGNORED_TARGET,
    Batch,
    Corpus,
    TokenBatches,
    is_token_file,
    load_corpus,
)
from graphfsdp.data.feed import Feed

__all__ = [
    "BYTES_VOCAB_SIZE",
    "IGNORED_TARGET",
    "Batch",
    "Corpus",
    "Feed",
    "TokenBatches",
    "is_token_file",
    "load_corpus",
]
