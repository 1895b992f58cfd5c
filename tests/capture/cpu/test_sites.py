"""Each recorded operator knows its phase, its module and the user's line."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cpu_recording import CPU
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.trace.source import OpPhase, Site
from graphfsdp._capture.trace.values import Node


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


class Root(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.inner = Twice()
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            hidden = checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(hidden, Tensor)
            return hidden.square()
        out: Tensor = self.inner(x).square()
        return out


def record(model: Root) -> list[tuple[str, Site]]:
    x = torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, CPU)
    with recorder.watching():
        loss = model(x).sum()
        loss.backward()
        with torch.no_grad():
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        del loss
    sites = recorder.sites.sites()

    def name(node: Node) -> str:
        return str(node.op._schema.name.removeprefix("aten::"))

    return [(name(node), sites[node.site]) for node in recorder.nodes]


def test_what_a_gradient_hook_does_belongs_to_the_module_that_owns_the_parameter() -> None:
    model = Root()

    def hook(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.cos_()

    model.inner.scale.register_post_accumulate_grad_hook(hook)
    found = dict(record(model))
    assert found["cos_"] == Site(OpPhase.BACKWARD, "inner", None)


def test_what_follows_a_backward_pass_without_gradients_is_the_optimizer() -> None:
    ops = [op for op, site in record(Root()) if site.phase is OpPhase.OPTIMIZER]
    assert ops == ["_foreach_mul_", "add_", "add_", "add_"]  # clip; a step for each parameter


def test_recomputation_belongs_to_the_backward_pass_of_its_module() -> None:
    found = [site for op, site in record(Root(recompute=True)) if op == "tanh"]
    assert [site.phase for site in found] == [OpPhase.FORWARD, OpPhase.BACKWARD]
    assert [site.module for site in found] == ["inner", "inner"]


def test_metrics_before_the_backward_pass_are_not_the_optimizer() -> None:
    model = Root()
    recorder = Recorder(model, CPU)
    with recorder.watching():
        out = model(torch.randn(2, 3))
        with torch.no_grad():
            out.abs().mean()
        out.sum().backward()
    sites = recorder.sites.sites()
    found = {str(node.op): sites[node.site].phase for node in recorder.nodes}
    assert found["aten.abs.default"] is OpPhase.FORWARD
