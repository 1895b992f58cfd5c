"""Writes optimizer_steps.json: steps of published implementations on recorded gradients.

    python tests/references/make_optimizer_steps.py MUON/muon.py

The file is github.com/KellerJordan/Muon's at the commit below. AdamW is torch's own, in float64.
Learning rate and weight decay are others in each step.
"""

import json
import pathlib
import runpy
import sys
from typing import Any

import torch
from torch import nn

MUON_COMMIT = "857d1adc159e098212f828d927460782d3da59e9"
SHAPES: list[tuple[int, ...]] = [(6, 4), (3, 7), (5,)]
NUM_STEPS = 6
LR, BASE_DECAY = 0.1, 0.02


def numbers_of(tensors: Any) -> list[list[float]]:
    """Return the elements of tensors, as float32 prints them."""
    return [[float(f"{x:.9g}") for x in tensor.detach().float().flatten()] for tensor in tensors]


def steps_of(make: Any, dtype: torch.dtype, start: Any, grads: Any) -> dict[str, Any]:
    """Return the weights after the first and after the last step."""
    params = [nn.Parameter(tensor.to(dtype, copy=True)) for tensor in start]
    optimizer = make(params)
    found = {}
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = LR / (1 + step), BASE_DECAY * step
        for param, grad in zip(params, grads[step], strict=True):
            param.grad = grad.to(dtype, copy=True)
        optimizer.step()
        if step in (0, NUM_STEPS - 1):
            found[str(step)] = numbers_of(params)
    return found


def main() -> None:
    muon = runpy.run_path(sys.argv[1])["SingleDeviceMuon"]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads = [
        [torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(NUM_STEPS)
    ]
    wide, matrices = torch.float64, [grads_of_step[:2] for grads_of_step in grads]
    optim: Any = torch.optim
    version = f"torch {torch.__version__.split('+')[0]}"
    found = {
        "adamw": {
            "source": f"torch.optim.AdamW of {version}",
            "settings": {"betas": (0.8, 0.9)},
            "weights": steps_of(
                lambda p: optim.AdamW(p, lr=LR, betas=(0.8, 0.9)), wide, start, grads
            ),
        },
        "muon": {
            "source": f"github.com/KellerJordan/Muon, muon.py, commit {MUON_COMMIT}",
            "settings": {"momentum": 0.9},
            "weights": steps_of(
                lambda p: muon(p, lr=LR, momentum=0.9),
                torch.float32,
                start[:2],
                matrices,
            ),
        },
    }
    facts = {
        "how": "tests/references/make_optimizer_steps.py",
        "shapes": SHAPES,
        "lr": LR,
        "decay": BASE_DECAY,
        "start": numbers_of(start),
        "grads": [numbers_of(step) for step in grads],
        "cases": found,
    }
    target = pathlib.Path(__file__).with_name("optimizer_steps.json")
    target.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
