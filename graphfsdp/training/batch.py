"""How an iteration's batch is cut over ranks and micro-batches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationBatch:
    """How the sequences of one iteration are cut over ranks and micro-batches.

    Attributes:
        micro_batch_size: Sequences of one forward and backward on one rank.
        num_microbatches: Forwards and backwards of an iteration, on each rank.
        num_ranks: Ranks that train on different parts.
        seq_length: Tokens of a sequence.
    """

    micro_batch_size: int
    num_microbatches: int
    num_ranks: int
    seq_length: int

    @property
    def num_sequences(self) -> int:
        """Sequences of the iteration, all ranks together."""
        return self.micro_batch_size * self.num_microbatches * self.num_ranks

    @property
    def num_tokens(self) -> int:
        """Tokens of the iteration, all ranks together."""
        return self.num_sequences * self.seq_length
