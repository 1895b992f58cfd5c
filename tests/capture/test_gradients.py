"""Gradients are views of persistent buffers for ever, readable after each call, equal eager's.

Also those that an iteration of the user's own assigns by hand.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.optim import FusedAdam
from helpers import OPTIMIZERS, Case, assert_same_run, assert_same_state, run, snapshot
from make_step import make_step
from zoo import features
from zoo_models import WIDTH, UnusedParameter


def addresses(model: nn.Module) -> dict[str, int]:
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.data_ptr() for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("scope", ["none", "forward_backward", "full_iteration"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_stay_in_one_storage_for_ever(
    scope: str, microbatches: int, device: torch.device
) -> None:
    """With the strides of their parameters; one that is not dense has a contiguous gradient."""
    for name in ("channels_last", "odd_shapes"):
        step, model, _, next_batch = make_step(
            device, name, scope=scope, microbatches=microbatches, max_grad_norm=0.1
        )
        step(*next_batch())
        first = addresses(model)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert len(first) == len(grads) == len(list(model.parameters()))
        storages = {grad.untyped_storage().data_ptr() for grad in grads if grad.numel()}
        assert len(storages) == 1
        for _ in range(7):
            step(*next_batch())
            assert addresses(model) == first
        for name, param in model.named_parameters():
            assert param.grad is not None
            if name == "sliced":
                assert param.grad.is_contiguous()
            else:
                assert param.grad.stride() == param.stride()


Disturb = Callable[[nn.Module, torch.optim.Optimizer], object]


def for_each_gradient(make: Callable[[nn.Parameter], Tensor | None]) -> Disturb:
    def disturb(model: nn.Module, optim: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad = make(param)

    return disturb


def backward_by_hand(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.stack([param.float().sum() for param in model.parameters()]).sum().backward()


def moves_gradients(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for grad in (param.grad for param in model.parameters()):
        if grad is not None:
            grad.data = torch.full_like(grad, 7.0)


FORMS: dict[str, Disturb] = {
    "set_to_none": lambda model, optim: optim.zero_grad(set_to_none=True),
    "set_to_zero": lambda model, optim: optim.zero_grad(set_to_none=False),
    "model_zero_grad": lambda model, optim: model.zero_grad(),
    "by_hand": for_each_gradient(lambda param: None),
    "other_tensor": for_each_gradient(lambda param: torch.full_like(param, 7.0)),
    "overwritten": for_each_gradient(
        lambda param: None if param.grad is None else param.grad.fill_(float("nan"))
    ),
    "moved": moves_gradients,
    "backward_by_hand": backward_by_hand,
}


@pytest.mark.parametrize(
    ("disturb", "scope", "microbatches"),
    [
        (disturb, scope, 1 + (number + is_whole) % 2)
        for number, disturb in enumerate(FORMS.values())
        for is_whole, scope in enumerate(("forward_backward", "full_iteration"))
    ],
)
def test_what_happens_to_gradients_between_calls_does_not_matter(
    disturb: Disturb, scope: str, microbatches: int, device: torch.device
) -> None:
    options: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": 0.1}
    step, model, optim, next_batch = make_step(device, "shared_layer", scope="none", **options)
    expected = []
    for _ in range(8):
        step(*next_batch())
        expected.append(snapshot(model, optim))
    step, model, optim, next_batch = make_step(device, "shared_layer", scope=scope, **options)
    first: dict[str, int] = {}
    for index in range(8):
        disturb(model, optim)
        step(*next_batch())
        assert_same_state(expected[index], snapshot(model, optim), f"call {index}")
        first = first or addresses(model)
        assert addresses(model) == first


def test_a_parameter_that_no_gradient_reaches_has_none_and_is_named(device: torch.device) -> None:
    """Nor is one accumulated that was there before the capture."""
    step, model, optim, next_batch = make_step(device, "unused_parameter")
    assert isinstance(model, UnusedParameter)
    model.unused.weight.grad = torch.ones_like(model.unused.weight)
    before = model.unused.weight.detach().clone()
    for _ in range(7):
        step(*next_batch())
        assert model.unused.weight.grad is None
    assert torch.equal(before, model.unused.weight)
    assert model.frozen.weight.grad is None
    assert model.used.weight.grad is not None
    assert model.unused.weight not in optim.state
    assert step.report().without_gradient == ("unused.weight", "unused.bias")
    assert "without gradient:  unused.weight, unused.bias" in str(step.report())


def test_a_sparse_gradient_is_refused_by_name(device: torch.device) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)).to(device)
    step = graphfsdp.capture(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, x: m(x).mean()
    )
    with pytest.raises(graphfsdp.CaptureError, match=r"'0.weight' has layout torch.sparse_coo"):
        step(torch.tensor([1, 2], device=device))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_gradient_made_with_create_graph_lands_too(device: torch.device) -> None:
    """autograd then accumulates out of place: microbatch two must not be counted twice."""

    def iteration(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        for _ in range(3):
            loss = mean_square(model, x)
            loss.backward(create_graph=True)
        optimizer.step()
        return loss

    model = nn.Linear(WIDTH, 1).to(device)
    x = torch.randn(4, WIDTH, device=device)
    expected = torch.autograd.grad(mean_square(model, x), model.weight)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with graphfsdp.capture(model, optimizer, iteration=iteration, scope="none") as step:
        for _ in range(2):
            step(x)
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.grad, 3 * expected)
        assert len(set(addresses(model).values())) == 2


def test_microbatches_add_up_in_the_gradients_dtype(device: torch.device) -> None:
    """In bfloat16, 1 + 2**-9 + 2**-9 is 1."""
    model = nn.Linear(1, 1, bias=False).to(device, torch.bfloat16)
    optim = FusedAdam(model.parameters(), lr=0.0, use_decoupled_grad=True)
    step = graphfsdp.capture(
        model,
        optim,
        loss_fn=lambda m, x: m(x.bfloat16()).sum(),
        mp_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32, use_decoupled_grad=True),
        microbatches=3,
    )
    x = torch.tensor([[3.0], [3 * 2.0**-9], [3 * 2.0**-9]], device=device)
    for _ in range(6):
        step(x)
        grad = getattr(model.weight, "decoupled_grad", None)
        assert isinstance(grad, Tensor)
        assert float(grad) == pytest.approx(1 + 2**-8, rel=2**-9)
        assert float(grad) > 1.002


def test_gradients_of_different_dtypes_lie_in_buffers_of_their_own(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m[1](m[0](x).double()).sum())
    for _ in range(5):
        step(torch.ones(3, 2, device=device))
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert [grad.dtype for grad in grads] == [torch.float32] * 2 + [torch.float64] * 2
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 2


def all_by_hand(model: nn.Module, loss: Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad * 2


def one_by_hand(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    bias = next(param for param in model.parameters() if param.ndim == 1)
    assert bias.grad is not None
    bias.grad = bias.grad.sign()


def taken_off(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


@pytest.mark.parametrize(
    ("optimizer", "backward"),
    [
        *((name, all_by_hand) for name in OPTIMIZERS),
        *(("fused_adam", one_by_hand), ("adamw", one_by_hand)),
        *(("fused_adam", taken_off), ("sgd", taken_off)),
    ],
)
def test_replays_leave_them_where_eager_iterations_and_plain_loops_do(
    optimizer: str, backward: Callable[[nn.Module, Tensor], None]
) -> None:
    def iteration(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        backward(model, loss)
        optimizer.step()
        if backward is taken_off:
            optimizer.zero_grad()
        return loss

    case = Case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)), features(4)
    )
    options: dict[str, Any] = {"optimizer": optimizer, "iteration": iteration}
    captured, *others = (
        run(case, scope, torch.device("cpu"), **options)
        for scope in ("full_iteration", "none", "plain")
    )
    for other in others:
        assert_same_run(other, captured)
    assert captured.report.num_calls["replay"] == 10
    for state in captured.snapshots:
        num_grads = sum(name.startswith("grad of") for name in state)
        assert num_grads == (0 if backward is taken_off else 4)
