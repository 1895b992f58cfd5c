"""Each recorded operator knows its phase and its module."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphfsdp


class Twice(nn.Module):
    """A linear layer that runs twice, and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        out: Tensor = self.linear(x) * self.scale
        return out


def changed_by_a_hook(param: Any) -> None:
    param.grad.cos_()


def iterate(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    out = checkpoint(model.inner, x, use_reentrant=False, preserve_rng_state=False).square()
    with torch.no_grad():
        size = out.abs().mean()  # a metric before the backward pass
    loss: Tensor = out.sum()
    loss.backward()
    with torch.no_grad():
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)
    optimizer.step()
    scaled: Tensor = loss * size
    return scaled


def test_operators_belong_to_the_pass_and_the_module_that_called_them() -> None:
    model: Any = nn.ModuleDict({"inner": Twice()})
    model.inner.scale.register_post_accumulate_grad_hook(changed_by_a_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphfsdp.capture(model, optimizer, iteration=iterate) as step:
        for _ in range(4):
            step(torch.randn(2, 3))
        nodes = list(step.report().nodes())
    found: dict[str, list[tuple[str, str | None]]] = {}
    for node in nodes:
        site = node.site.phase.value, node.site.module
        found.setdefault(node.op.split(".")[1], []).append(site)
    assert found["abs"] == [("forward", None)]
    assert found["tanh"] == [("forward", "inner"), ("backward", "inner")]  # and recomputed
    assert found["cos_"] == [("backward", "inner")]
    assert [phase for phase, _ in found["_foreach_mul_"]] == ["optimizer"]
