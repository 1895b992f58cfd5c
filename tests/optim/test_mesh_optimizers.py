"""Optimizers that need whole tensors, and skipped steps, on meshes of two axes."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import Muon
from helpers import local_part
from parallel_models import TP_AXES, part_of_axis, plain_model, tensor_parallel, whole_batches
from ranks import RankPool
from sharding_helpers import full_parameters, hybrid_mesh, hybrid_net, make_net


def muon_of(model: nn.Module) -> Muon:
    trainable = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trainable if param.dim() == 2]
    others = [param for param in trainable if param.dim() != 2]
    return Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return whole weights after steps along gradients that each element decides for itself."""
    for index in range(3):
        for param in model.parameters():
            if param.requires_grad:
                param.grad = param.detach().clone()
                local_part(param.grad).mul_(7).add_(index).sin_()
        optimizer.step()
    return full_parameters(model)


def same_steps(kind: str) -> None:
    model, plain = {
        "tensor": lambda: (tensor_parallel(), plain_model()),
        "repeated": lambda: (hybrid_net("optim_grads_params", "no_shard"), make_net(None)),
        "cut": lambda: (hybrid_net("optim", "optim"), make_net(None)),
    }[kind]()
    got, expected = stepped(model, muon_of(model)), stepped(plain, muon_of(plain))
    for name, whole in expected.items():
        bound = 1e-10 if whole.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(got[name], whole, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["tensor", "repeated", "cut"])
def test_whole_tensors_are_found_over_all_axes(ranks4: RankPool, kind: str) -> None:
    ranks4.run(same_steps, kind)


def skipped(kind: str) -> None:
    """One rank alone has a loss that is not finite: no rank steps."""
    if kind == "tensor":
        mesh = hybrid_mesh((2, 2), TP_AXES)
        parts = [part_of_axis(batch, mesh, "dp") for batch in whole_batches()[:6]]
        model = tensor_parallel()
        bad = mesh.get_local_rank("dp") == 1
    else:
        parts = [list(batch) for batch in whole_batches()[:6]]
        model = hybrid_net("optim_grads_params", "optim")
        bad = dist.get_rank() == 3

    def loss_fn(model: Any, tokens: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets) * factor
        return loss

    factors = torch.ones(6)
    factors[4] = math.inf if bad else 1.0  # in a replay
    optimizer: Any = graphfsdp.optim.FusedAdam(
        [param for param in model.parameters() if param.requires_grad], lr=0.02
    )
    before: dict[str, Tensor] = {}
    with graphfsdp.capture(
        model, optimizer, loss_fn=loss_fn, skip_nonfinite=True, warmup_steps=2
    ) as step:
        for index, part in enumerate(parts):
            if index == 4:
                before = full_parameters(model)
            step(*part, factors[index].clone())
            if index == 4:
                assert all(map(torch.equal, before.values(), full_parameters(model).values()))
        assert step.skipped_steps is not None
        assert step.skipped_steps.item() == 1
    assert not all(map(torch.equal, before.values(), full_parameters(model).values()))


@pytest.mark.parametrize("kind", ["tensor", "hybrid"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    ranks4: RankPool, kind: str
) -> None:
    ranks4.run(skipped, kind)
