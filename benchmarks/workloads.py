"""What is measured: GPTs of a few sizes, each built from the same seed for every scope."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

import graphfsdp
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

SCOPES = ("none", "forward_backward", "full_iteration")
WARMUP_STEPS = 3
NUM_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A model, a batch and a precision.

    Attributes:
        name: For tables and command lines.
        model: Shape of the GPT.
        batch_size: Sequences per step.
        bf16: bfloat16 model weights with float32 main weights, else all float32.
        num_threads: Threads of torch on a CPU.
    """

    name: str
    model: GPTConfig
    batch_size: int
    bf16: bool = False
    num_threads: int = 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on."""
        return self.batch_size * self.model.seq_length

    @property
    def shape(self) -> str:
        """The batch, for tables."""
        return f"{self.batch_size} x {self.model.seq_length}"


def gpt(num_layers: int, hidden_size: int, seq_length: int, vocab_size: int = 256) -> GPTConfig:
    """Return a GPT-2-style model with heads of 16 to 64 channels."""
    return GPTConfig(
        vocab_size=vocab_size,
        seq_length=seq_length,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // min(64, hidden_size // 4),
    )


TINY = Workload("tiny", gpt(4, 64, 32), batch_size=4)
TINY_LLAMA = Workload(
    "tiny-llama",
    replace(gpt(4, 64, 32), position_embedding_type="rope", normalization="RMSNorm", swiglu=True),
    batch_size=4,
)
GPT_3M = Workload("gpt-3.3m", gpt(4, 256, 128), batch_size=8)
GPT_11M = Workload("gpt-10.9m", gpt(6, 384, 128), batch_size=8)
GPT2_124M = Workload("gpt2-124m", gpt(12, 768, 1024, vocab_size=50304), batch_size=8, bf16=True)
GPT_1B = Workload("gpt-1b", gpt(24, 1792, 1024, vocab_size=50304), batch_size=8, bf16=True)


def find(name: str) -> Workload:
    """Return the workload of that name."""
    workloads = {workload.name: workload for workload in (TINY, GPT_3M, GPT_11M, GPT2_124M)}
    return workloads[name]


class Run:
    """One workload under one scope, ready to step; close it, or use it as a context manager."""

    def __init__(
        self,
        workload: Workload,
        scope: str,
        device: torch.device,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        config = replace(workload.model, hidden_dropout=dropout, attention_dropout=dropout)
        self.model = GPT(config).to(device)
        if workload.bf16:
            for parameter in self.model.parameters():  # not the buffers: RoPE needs float32
                parameter.data = parameter.data.bfloat16()
        self.optimizer = FusedAdam(
            self.model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            master_weights=workload.bf16,
        )
        self.step = graphfsdp.capture(
            self.model,
            self.optimizer,
            scope=scope,
            warmup_steps=WARMUP_STEPS,
            max_grad_norm=1.0,
        )
        self._batches = batches(workload, device)

    def __call__(self) -> Tensor:  # [] float32 loss
        """Train one step on the next batch, without a host sync."""
        loss: Tensor = self.step(*next(self._batches))
        return loss

    def warm_up(self) -> None:
        """Run until the graph is recorded and has been replayed."""
        for _ in range(WARMUP_STEPS + 3):
            self()

    def close(self) -> None:
        """Free the graph."""
        self.step.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def batches(workload: Workload, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets for ever, the same for every scope; no two in a row are equal."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_BATCHES, workload.batch_size, workload.model.seq_length + 1)
    tokens = torch.randint(workload.model.vocab_size, shape, generator=generator).to(device)
    pairs = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]
    while True:
        yield from pairs
