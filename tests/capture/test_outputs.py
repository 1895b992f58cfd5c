"""What a call returns: the caller's to keep; losses, other results, the norm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from helpers import NUM_STEPS, Case, run_as_eager, set_lr
from make_step import make_step
from zoo import ZOO, loss_with_extras


def test_writing_into_outputs_disturbs_nothing(device: torch.device) -> None:
    def losses(scope: str, *, spoils: bool) -> list[Tensor]:
        step, _, optim, next_batch = make_step(device, "extras", scope=scope)
        found = []
        for index in range(NUM_STEPS):
            set_lr(optim, 0.02 / (1 + index))
            batch = next_batch()
            output = step(*batch)
            found.append(output[0].clone())
            if spoils:
                for leaf in torch.utils._pytree.tree_leaves(output):
                    leaf.zero_()
                for tensor in batch:
                    tensor.fill_(float("nan"))
        return found

    expected = losses("none", spoils=False)
    for scope in ("none", "forward_backward", "full_iteration"):
        got = losses(scope, spoils=True)
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True)), scope


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x, y: [y, y],
        lambda model, x, y: [y, y.t()],
        lambda model, x, y: [y, y[:1], y.view(-1)],
        lambda model, x, y: [x, x, x[:2]],
        lambda model, x, y: [model.layers[0].weight, model.layers[0].weight.data[1:]],
        lambda model, x, y: [y.real, y.detach()],
    ],
    ids=["twice", "transposed", "sliced", "inputs", "weights", "detached"],
)
@pytest.mark.parametrize("scope", ["none", "full_iteration"])
def test_no_two_outputs_share_memory(
    make: Callable[..., list[Tensor]], scope: str, device: torch.device
) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return model(x), make(model, x, y)

    step, model, _, next_batch = make_step(device, scope=scope, loss_fn=loss_fn)
    kept: list[Tensor] = []
    for _ in range(7):
        loss, outputs = step(*next_batch())
        kept += [loss, *outputs]
    assert not any(tensor.requires_grad for tensor in kept)
    latest = step._runner._recordings.latest
    assert latest is not None
    inside = [*model.parameters(), *latest.inputs.tensors()]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*kept, *inside)]
    numel = [tensor.untyped_storage().nbytes() for tensor in (*kept, *inside)]
    assert all(numel)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("value", [0.01, 1e9])
def test_grad_norm_is_that_of_the_gradients_before_clipping(
    value: float, device: torch.device
) -> None:
    step, model, _, next_batch = make_step(device, max_grad_norm=float("inf"))
    assert step.grad_norm is None
    norms: list[Tensor] = []
    for _ in range(7):
        step(*next_batch())
        assert step.grad_norm is not None
        norms.append(step.grad_norm)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert torch.equal(norms[-1], torch.nn.utils.get_total_norm(grads, foreach=True))
    clipped, _, _, next_batch = make_step(device, max_grad_norm=value)
    clipped(*next_batch())
    assert clipped.grad_norm is not None
    assert torch.equal(clipped.grad_norm, norms[0])
    assert len({float(norm) for norm in norms}) == len(norms)


def test_other_results_of_microbatches_are_stacked(device: torch.device) -> None:
    step, model, _, next_batch = make_step(device, "extras", microbatches=3)
    for _ in range(6):
        (x,) = next_batch()
        with torch.no_grad():
            parts = [loss_with_extras(model, part) for part in x.chunk(3)]
        _, extras = step(x)
        for name in ("input", "transposed", "correct"):
            assert torch.equal(extras[name], torch.stack([part[1][name] for part in parts])), name


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda model, x: 1.0, "the loss is a float"),
        (lambda model, x: None, "the loss is a NoneType"),
        (lambda model, x: (), "the loss is a tuple"),
        (lambda model, x: {"loss": model(x)}, "the loss is a dict"),
        (lambda model, x: model.layers(x), r"a tensor of shape \(12, 3\)"),
        (lambda model, x: model(x).detach(), "no trainable parameter contributed"),
        (lambda model, x: (model(x), 3), "returned a int beside the loss"),
        (lambda model, x: (model(x), {"name": "x"}), "returned a str beside the loss"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(
    loss_fn: Callable[..., Any], message: str, device: torch.device
) -> None:
    step, model, optim, next_batch = make_step(device, loss_fn=loss_fn)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(graphfsdp.InvalidLossError, match=message):
        step(*next_batch())
    assert all(
        torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    )
    assert not optim.state


def test_a_loss_of_one_element_need_not_be_0_dimensional(device: torch.device) -> None:
    case = ZOO["mlp"]
    wide = Case(case.make, case.batch, lambda model, x: model(x).view(1, 1))
    assert run_as_eager(wide, device).outputs[-1][0].shape == (1, 1)
