"""What the guards before each replay cost, asked and at one look, beside the replay itself.

``python -m benchmarks.guard_cost`` prints a table and writes results/guard_cost_cpu.json.
"""

import json
import pathlib
import timeit
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphfsdp
from benchmarks.environment import describe
from graphfsdp.optim import FusedAdam

RESULTS = pathlib.Path(__file__).parent / "results" / "guard_cost_cpu.json"
NUM_BLOCKS = 25  # 12 parameters each
WIDTH = 8
NUM_REPEATS = 201  # short windows: a busy machine interrupts few of them
NUM_CALLS = 2


class Block(nn.Module):
    """A decoder block of 12 parameters in 13 modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "drop": nn.Dropout(0.1)}
        )
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend and mix: [B, T, WIDTH] to [B, T, WIDTH]."""
        query, key, value = self.attention["qkv"](self.norm(x)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.attention["drop"](self.out(mixed))
        result: Tensor = x + self.mlp(x)
        return result


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return one of the optimizers that are compared."""
    if name == "FusedAdam":
        return FusedAdam(model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def least_us(call: Any) -> float:
    """Return the microseconds of one call in the shortest of many short windows.

    Guards are Python alone, so that whatever is longer was something else on the machine.
    """
    return min(timeit.repeat(call, number=NUM_CALLS, repeat=NUM_REPEATS)) / NUM_CALLS * 1e6


def measure(optimizer: str) -> dict[str, float]:
    """Return microseconds by guard, of all guards, and of one replay with them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    optim = make_optimizer(optimizer, model)
    x = torch.randn(2, 4, WIDTH)
    step = graphfsdp.capture(
        model, optim, loss_fn=lambda model, batch: model(batch).square().mean()
    )
    for _ in range(6):
        step(x)
    recording = step._runner._recordings.latest
    assert recording is not None
    guards = recording.guards
    assert guards is not None
    found: dict[str, float] = {}
    for index, guard in enumerate(guards._guards):
        assert guard.holds()
        name = type(guard).__name__
        found[f"{name} (gradients)" if index == 2 else name] = least_us(guard.holds)
    found["asked in a row"] = least_us(lambda: all([each.holds() for each in guards._guards]))
    assert guards.changes() == []
    found["all guards, one look at memory"] = least_us(guards.changes)
    found["one replay"] = least_us(lambda: step(x))
    found["number of parameters"] = len(list(model.parameters()))
    found["number of modules"] = len(list(model.modules()))
    step.close()
    return found


def main() -> None:
    """Measure, print, and write the result file."""
    torch.set_num_threads(1)
    names = ("FusedAdam", "torch AdamW")
    results = {name: measure(name) for name in names}
    table = Table(title="Guards before a replay, microseconds (shortest window)")
    table.add_column("part")
    for name in names:
        table.add_column(name, justify="right")
    for part in results[names[0]]:
        table.add_row(part, *(f"{results[name][part]:.1f}" for name in names))
    Console().print(table)
    record = {"environment": describe(torch.device("cpu")), "microseconds": results}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
