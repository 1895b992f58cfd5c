"""Tokens on their way into a training: files, their order, packed documents, copies to a GPU.

Imports nothing of ours but errors. ``Feed`` takes any loader; the rest makes batches of tokens:

    corpus = load_corpus("tokens.npy")
    batches = TokenBatches(corpus, seq_length=1024, batch_size=64, rank=rank, num_ranks=2)
    feed = Feed(batches, device)
    for tokens, targets in feed:
        loss = step(tokens, targets)
        ...
        graphfsdp.save(folder, model, optimizer, objects={"data": feed})
"""

from graphfsdp.data.batches import IGNORED_TARGET, Batch, TokenBatches
from graphfsdp.data.corpus import BYTES_VOCAB_SIZE, Corpus, is_token_file, load_corpus
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
