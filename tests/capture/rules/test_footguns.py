"""Surprises of a captured step that nothing refuses: what happens now, and what one would expect.

What is refused is in test_refused.py and in the tests of the guards.
"""

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from footgun_net import Net, inputs, start
from graphfsdp.optim import FusedAdam
from helpers import assert_alive, assert_same_run, run
from zoo import ZOO


def test_a_kept_activation_is_overwritten(device: torch.device) -> None:
    kept: dict[str, Tensor] = {}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        kept["mean"] = x.mean()
        loss: Tensor = model(x)
        return loss

    step, *_ = start(device, loss_fn)
    seen = []
    for index in range(8):
        step(torch.full((8, 4), float(index), device=device))
        seen.append(kept["mean"])
    # Intuitive: 0 to 7. From the recording on it is one tensor; clone what is to be kept, or
    # return it from loss_fn.
    assert [float(mean) for mean in seen] == [0, 1, 2, 7, 7, 7, 7, 7]


def test_gradients_after_clipping_differ(device: torch.device) -> None:
    """FusedAdam scales while it reads; torch's optimizers need the scaled gradient in .grad."""
    norms = {}
    for name in ("fused_adam", "sgd"):
        model = Net().to(device)
        optim: torch.optim.Optimizer = FusedAdam(model.parameters())
        if name == "sgd":
            optim = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = graphfsdp.capture(model, optim, max_grad_norm=0.01)
        for _ in range(6):
            step(inputs(device))
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norms[name] = float(torch.nn.utils.get_total_norm(grads))
        assert step.grad_norm is not None
        assert float(step.grad_norm) > 0.01
    # Intuitive: the same. step.grad_norm is the norm before clipping with both.
    assert norms["sgd"] == pytest.approx(0.01, rel=1e-3)
    assert norms["fused_adam"] > 0.02


def test_an_old_graph_raises(device: torch.device) -> None:
    """The weights that an older forward pass saved have been written since."""
    step, model, _ = start(device, lr=0.1)
    for _ in range(5):
        step(inputs(device))
    hidden = model.layer(inputs(device).requires_grad_()).square().mean()
    step(inputs(device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.backward()


def test_autocast_around_the_loop_uses_no_stale_weights(device: torch.device) -> None:
    """Its cache of casted weights outlives a call, and the weights change in between."""
    expected = run(ZOO["autocast"], "plain", device)  # is entered in each call
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for scope in ("none", "forward_backward", "full_iteration"):
            assert_same_run(expected, run(ZOO["mlp"], scope, device))
    assert_alive(expected)
