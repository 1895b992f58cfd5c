"""A captured step: its phases, what it reads, and what its calls return, the caller's to keep."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from helpers import (
    OPTIMIZERS,
    Case,
    assert_same_run,
    assert_same_states,
    make_optimizer,
    no_host_sync,
    run,
    run_as_eager,
    set_lr,
    snapshot,
)
from make_step import make_step
from zoo import ZOO, loss_with_extras


def test_recording_may_be_the_first_call_without_the_optimizer() -> None:
    """On a CPU: libraries of CUDA initialise themselves in a warm-up."""
    cpu = torch.device("cpu")
    expected = run(ZOO["mlp"], "none", cpu, num_steps=5)
    got = run(ZOO["mlp"], "forward_backward", cpu, num_steps=5, warmup_steps=0)
    assert_same_run(expected, got)


@pytest.mark.parametrize("num_calls", [0, 1, 4, 6])
def test_phases_follow_one_another_and_closing_is_final(
    num_calls: int, device: torch.device
) -> None:
    """So is to leave the context, also by an error; and all that more than once."""
    step, model, _, next_batch = make_step(device, warmup_steps=2)
    assert step.__enter__() is step
    for index in range(num_calls):
        assert step.phase is (Phase.WARMUP if index < 3 else Phase.REPLAY)
        step(*next_batch())
    with pytest.raises(KeyError), step:
        raise KeyError
    step.close()
    assert step.phase is Phase.CLOSED
    with pytest.raises(graphfsdp.PhaseError, match=r"closed.*capture again"):
        step(*next_batch())
    assert step.report().phase == "closed"
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_two_steps_over_one_model_take_turns(device: torch.device) -> None:
    """Two losses, each with an optimizer of its own, as adversarial training has them."""

    def train(scope: str) -> list[dict[str, Tensor]]:
        first, model, optim, next_batch = make_step(device, scope=scope, max_grad_norm=0.1)
        other = make_optimizer("sgd", model.parameters(), device)
        second = graphfsdp.capture(
            model, other, scope=scope, loss_fn=lambda model, x: model(-x).exp()
        )
        found = []
        for _ in range(14):
            first(*next_batch())
            second(*next_batch())
            found += [snapshot(model, optim), snapshot(model, other)]
        return found

    assert_same_states(train("none"), train("full_iteration"))


def test_seeding_between_replays_reaches_them(device: torch.device) -> None:
    run_as_eager(ZOO["mlp"], device, between=lambda step, model, at: torch.manual_seed(at // 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replay_reads_nothing_on_the_host_and_runs_no_python_of_the_iteration(
    optimizer: str, device: torch.device
) -> None:
    step, _, optim, next_batch = make_step(device, "gpt", optimizer, max_grad_norm=1.0)
    for _ in range(5):
        step(*next_batch())
    for index in range(3):
        batch = next_batch()
        set_lr(optim, 0.01 / (index + 1))
        with no_host_sync(device):
            step(*batch)
    seen: set[str] = set()

    def hook(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    batch = next_batch()
    sys.setprofile(hook)
    try:
        step(*batch)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("runner.py:Runner.run") for name in seen)
    engine = ("/torch/autograd/__init__.py", "/torch/autograd/function.py")
    model_and_optimizer = ("/torch/nn/", "/torch/optim/", "zoo.py", "FusedAdam.step")
    forbidden = (*engine, *model_and_optimizer, "iteration.py")
    assert not [name for name in seen if any(part in name for part in forbidden)]


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
@pytest.mark.parametrize("scope", ["none", "forward_backward", "full_iteration"])
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


def test_a_loss_of_one_element_need_not_be_0_dimensional(device: torch.device) -> None:
    case = ZOO["mlp"]
    wide = Case(case.make, case.batch, lambda model, x: model(x).view(1, 1))
    assert run_as_eager(wide, device).outputs[-1][0].shape == (1, 1)
