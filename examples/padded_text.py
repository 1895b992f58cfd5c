"""Train on lines of any length with as many graphs as there are padded lengths.

A graph has fixed shapes, so each length that occurs would cost a capture. Batches are padded to a
few lengths instead, and the targets of the padding are what torch's cross entropy ignores.
"""

import random
from pathlib import Path

import torch
from torch import Tensor

import graphfsdp
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

LENGTHS = (16, 32, 64)  # of which each has a graph
NUM_ROWS = 8  # of every batch, the last one too
IGNORED_TARGET = -100


def pad(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids and the ids that follow them, [NUM_ROWS, one of LENGTHS] each."""
    longest = max(len(line) for line in lines) - 1
    length = next(length for length in LENGTHS if length >= longest)
    ids = torch.zeros(NUM_ROWS, length, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED_TARGET)
    for row, line in enumerate(lines):
        ids[row, : len(line) - 1] = line[:-1]
        targets[row, : len(line) - 1] = line[1:]
    return ids, targets


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
text = Path(random.__file__).read_bytes().splitlines()
lines = [torch.tensor(list(line)) for line in text if 2 <= len(line) <= LENGTHS[-1] + 1]
# Neighbours of one length, so that little is padded; a batch of short lines gets a short graph.
lines.sort(key=len)
batches = [pad(lines[first : first + NUM_ROWS]) for first in range(0, len(lines), NUM_ROWS)]

config = GPTConfig(
    vocab_size=256,
    seq_length=LENGTHS[-1],
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    position_embedding_type="rope",
)
model = GPT(config).to(device)
optimizer = FusedAdam(model.parameters(), lr=3e-3)

with graphfsdp.capture(model, optimizer, on_change="recapture") as step:
    for epoch in range(3):
        losses = []
        for number in torch.randperm(len(batches)).tolist():
            ids, targets = batches[number]
            losses.append(step(ids.to(device), targets.to(device)))
        print(f"epoch {epoch + 1}  loss {torch.stack(losses).mean():.4f}")
    report = step.report()
print(f"{report.num_captures} graphs, {report.num_calls['replay']} replays")
