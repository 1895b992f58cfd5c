"""Writes optimizer_steps.json: steps of the published Muon on recorded gradients.

    python tests/references/make_optimizer_steps.py MUON/muon.py

The file is github.com/KellerJordan/Muon's at the commit below. Learning rate and weight decay are
others in each step.
"""

import json
import pathlib
import runpy
import sys
from typing import Any

import torch
from torch import nn

MUON_COMMIT = "857d1adc159e098212f828d927460782d3da59e9"
SHAPES: list[tuple[int, ...]] = [(6, 4), (3, 7), (5,)]  # the last is drawn and left out
NUM_STEPS = 6
LR, BASE_DECAY, MOMENTUM = 0.1, 0.02, 0.9


def numbers_of(tensors: Any) -> list[list[float]]:
    """Return the elements of tensors, as float32 prints them."""
    return [[float(f"{x:.9g}") for x in tensor.detach().float().flatten()] for tensor in tensors]


def steps_of(muon: Any, start: Any, grads: Any) -> dict[str, Any]:
    """Return the weights after the first and after the last step."""
    params = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = muon(params, lr=LR, momentum=MOMENTUM)
    found = {}
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = LR / (1 + step), BASE_DECAY * step
        for param, grad in zip(params, grads[step], strict=True):
            param.grad = grad.clone()
        optimizer.step()
        if step in (0, NUM_STEPS - 1):
            found[str(step)] = numbers_of(params)
    return found


def main() -> None:
    muon = runpy.run_path(sys.argv[1])["SingleDeviceMuon"]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        [torch.randn(shape, generator=generator) for shape in SHAPES][:2]
        for _ in range(1 + NUM_STEPS)
    ]
    start, *grads = drawn
    facts = {
        "how": "tests/references/make_optimizer_steps.py",
        "shapes": SHAPES[:2],
        "lr": LR,
        "decay": BASE_DECAY,
        "start": numbers_of(start),
        "grads": [numbers_of(step) for step in grads],
        "source": f"github.com/KellerJordan/Muon, muon.py, commit {MUON_COMMIT}",
        "settings": {"momentum": MOMENTUM},
        "weights": steps_of(muon, start, grads),
    }
    target = pathlib.Path(__file__).with_name("optimizer_steps.json")
    target.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
