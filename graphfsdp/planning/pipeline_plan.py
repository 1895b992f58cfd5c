"""What one rank of a pipeline has of a model, and what waiting for other stages costs."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphfsdp.planning.activations import measure_activations
from graphfsdp.training.batch import IterationBatch
from graphfsdp.training.build import make_model
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.gpt import token_loss
from graphfsdp.training.pipeline import GPTStage, cut_stages


class GPTPart(nn.Module):
    """The stages of one rank, each of which is run on made-up input."""

    def __init__(self, config: TrainConfig, vocab_size: int, dtype: torch.dtype, rank: int) -> None:
        """Take from a model on the meta device what ``rank`` of the pipeline has of it."""
        super().__init__()
        self.rank = rank
        model = make_model(config, vocab_size, torch.device("meta"), dtype)
        stages = cut_stages(config, model, rank)
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})
        self.units = [f"stages.{i}.blocks.{name}" for i, s in stages.items() for name in s.blocks]

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
    ) -> Tensor:  # [] something to go backward from
        """Run all stages once."""
        runs = [run_stage(stage, tokens) for stage in self.stages.values()]
        return torch.stack(runs).sum()


def run_stage(stage: nn.Module, tokens: Tensor) -> Tensor:
    """Run a stage on the meta device; return what its backward pass begins at."""
    assert isinstance(stage, GPTStage)
    dtype = next(stage.parameters()).dtype
    shape = (*tokens.shape, stage.config.hidden_size)
    hidden = torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)
    out = stage(tokens if stage.is_first else hidden)
    return token_loss(out, tokens) if stage.is_last else out.sum().float()


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline of equal stages, each micro-batch taking as long in each."""

    size: int
    num_virtual: int  # stages on each rank
    num_microbatches: int
    message_bytes: int  # of one activation, or its gradient
    totals: tuple[int, ...]  # bytes together, by rank of the pipeline

    @property
    def bubble(self) -> float:
        """Return the share of an iteration in which a rank waits.

        Source: Narayanan et al. 2021, section 2.2 (arXiv:2104.04473).
        """
        waits = self.size - 1
        return waits / (self.num_virtual * self.num_microbatches + waits)

    @property
    def sent_bytes(self) -> int:
        """What a rank in the middle sends in an iteration, forward and backward."""
        return 2 * self.num_virtual * self.num_microbatches * self.message_bytes


def num_in_flight(config: TrainConfig, batch: IterationBatch, rank: int) -> float:
    """Return for how many micro-batches a rank keeps activations at one time, all its stages.

    1F1B, in Megatron's and torch's order: as many stages have gone forward before the first goes
    backward.
    """
    size, virtual = config.pipeline_model_parallel_size, config.num_virtual_stages
    if virtual == 1:
        return min(batch.num_microbatches, size - rank)
    chunks = 2 * (size - rank - 1) + (virtual - 1) * size + 1
    return min(batch.num_microbatches, chunks / virtual)


def activation_bytes(config: TrainConfig, vocab_size: int, batch: IterationBatch, rank: int) -> int:
    """Return those of all stages on a rank; of the last stage one micro-batch's live at a time."""
    part = GPTPart(config, vocab_size, config.param_dtype, rank)
    shape = (config.micro_batch_size, config.seq_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    waiting, beyond = 0.0, 0
    for stage in part.stages.values():
        assert isinstance(stage, GPTStage)
        one = measure_activations(stage, functools.partial(run_stage, stage, tokens))
        count = 1 if stage.is_last else num_in_flight(config, batch, rank)
        waiting += one.saved_bytes * count
        beyond = max(beyond, one.peak_bytes - one.saved_bytes)
    return int(waiting) + beyond
