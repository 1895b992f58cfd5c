"""How the sequences of an iteration are cut."""

from dataclasses import dataclass

from graphfsdp.errors import ConfigError


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

    @classmethod
    def cut(
        cls,
        *,
        micro_batch_size: int,
        global_batch_size: int | None,
        num_ranks: int,
        seq_length: int,
        num_stages: int,
        is_interleaved: bool,
    ) -> "IterationBatch":
        """Cut over ranks, those of all ``num_stages`` of a pipeline among them.

        ConfigError: they do not come out even; it names the flags.
        """
        if num_ranks % num_stages:
            raise ConfigError(
                f"--pipeline-model-parallel-size {num_stages} does not divide the {num_ranks} "
                "ranks; start a multiple of it, or choose another"
            )
        num_ranks //= num_stages
        together = micro_batch_size * num_ranks
        num_sequences = global_batch_size or together
        if num_sequences % together:
            divisor = f"--micro-batch-size {micro_batch_size}"
            if num_ranks > 1:
                divisor += f" x {num_ranks} ranks = {together}"
            raise ConfigError(
                f"--global-batch-size {num_sequences} is not divisible by {divisor}: every rank "
                f"runs the same whole number of micro-batches; make it a multiple"
            )
        num_microbatches = num_sequences // together
        uneven = num_microbatches % num_stages and is_interleaved
        if num_microbatches < num_stages or uneven:
            needs = "a multiple of as many" if uneven else "at least as many"
            raise ConfigError(
                f"--pipeline-model-parallel-size {num_stages} needs {needs} micro-batches, and an "
                f"iteration has {num_microbatches}; give --global-batch-size "
                f"{together * num_stages}, or a multiple of that"
            )
        return cls(micro_batch_size, num_microbatches, num_ranks, seq_length)
