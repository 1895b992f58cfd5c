"""How the sequences of an iteration are cut."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationBatch:
    """How the sequences of one iteration are cut over ranks and micro-batches."""

    micro_batch_size: int  # sequences of one forward and backward on one rank
    num_microbatches: int  # on each rank
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
