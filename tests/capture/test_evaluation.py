"""Evaluation between training steps: right numbers, and training as if it had not been."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, assert_same_states, count_forwards, snapshot
from ranks import on_ranks
from sharding_helpers import batches as token_batches
from sharding_helpers import make_net, my_part

NUM_STEPS = 18
# How many evaluations follow each training step, in turn: none, several, several kinds.
PATTERN = ((), ("a",), ("a", "a", "b"), ("b",), (), ("c", "a"), ("a", "b"))


class Model(nn.Module):
    """Where training and evaluation differ in everything that can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.BatchNorm1d(8).eval()  # a mode of its own
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.frozen(self.drop(self.norm(self.first(x)).relu()))
        out: Tensor = self.last(hidden)
        return out.square().mean(), out


def batches(device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {"a": 6, "b": 4, "c": 1}
    return {key: torch.randn(n, 5, generator=generator).to(device) for key, n in sizes.items()}


def expected_evaluation(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What users write by hand; leaves modes as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        loss, out = model(x)
    for module, training in modes:
        module.training = training
    return [loss, out]


def train(
    device: torch.device, *, evaluates: bool, scope: str = "full_iteration", **options: Any
) -> list[dict[str, Tensor]]:
    """Return everything after each step; check every evaluation on the way."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    others = batches(device)
    states = []
    with graphfsdp.capture(model, optimizer, scope=scope, **options) as step:
        for index in range(NUM_STEPS):
            loss, _ = step(torch.randn(6, 5).to(device))
            states.append({"loss": loss, **snapshot(model, optimizer)})
            for key in PATTERN[index % len(PATTERN)] if evaluates else ():
                got = step.evaluate(others[key])
                want = expected_evaluation(model, others[key])
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
                assert not got[0].requires_grad
                assert not model.frozen.training
                assert model.drop.training
                assert_same_state(states[-1], {"loss": loss, **snapshot(model, optimizer)})
        if evaluates and scope != "none":
            assert step._runner._evaluations.num_graphs == 3
    return states


@pytest.mark.parametrize("scope", ["full_iteration", "forward_backward", "none"])
def test_training_is_bit_for_bit_that_without_evaluation(scope: str, device: torch.device) -> None:
    expected = train(device, evaluates=False, scope="none", max_grad_norm=1.0)
    got = train(device, evaluates=True, scope=scope, max_grad_norm=1.0)
    assert_same_states(expected, got)


def loss_with_draws(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x + torch.rand_like(x))[0]
    return loss


def test_evaluation_that_draws_leaves_the_generator_alone(device: torch.device) -> None:
    def run(evaluates: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model().to(device)
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        losses = []
        with graphfsdp.capture(model, optimizer, loss_fn=loss_with_draws) as step:
            for _ in range(16):
                losses.append(step(torch.randn(6, 5).to(device)))
                if evaluates:
                    step.evaluate(torch.ones(6, 5, device=device))
        return losses

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_evaluation_before_the_first_step_and_by_replay(device: torch.device) -> None:
    model = Model().to(device)
    num_forwards = count_forwards(model)
    x = torch.randn(6, 5, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
        results = [step.evaluate(x)[1] for _ in range(12)]
        assert num_forwards() == 2  # eagerly once, recorded once
        assert step.phase is Phase.WARMUP
        assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(results[0], result) for result in results)
    assert len({result.data_ptr() for result in results}) == len(results)


def test_microbatches_of_an_evaluation_give_the_mean_loss(device: torch.device) -> None:
    model = Model().to(device)
    x = torch.randn(6, 5, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), microbatches=3) as step:
        for _ in range(3):
            loss, out = step.evaluate(x)
            want, rows = expected_evaluation(model, x)
            torch.testing.assert_close(loss, want)
            torch.testing.assert_close(out.flatten(0, 1), rows)


def move_buffers(model: Model) -> None:
    model.norm.running_mean = torch.full_like(model.norm.running_mean, 0.5)  # type: ignore[arg-type]


def replace_a_module(model: Model) -> None:
    model.drop = nn.Dropout(0.5)
    model.last = nn.Linear(8, 1).to(model.first.weight.device)


@pytest.mark.parametrize("change", [move_buffers, replace_a_module])
def test_evaluation_follows_a_model_that_has_changed(
    change: Callable[[Model], None], device: torch.device
) -> None:
    model = Model().to(device)
    x = torch.randn(6, 5, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
        for index in range(9):
            if index == 4:
                change(model)
            if index == 6:
                model.eval()  # as before an evaluation by hand
            got = step.evaluate(x)
            want = expected_evaluation(model, x)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), index


def test_an_evaluation_that_cannot_be_captured_is_refused_and_leaves_no_trace(
    device: torch.device,
) -> None:
    model = Model().to(device)
    optimizer = FusedAdam(model.parameters())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)[0]
        return loss if model.training else loss * loss.item()

    x = torch.randn(6, 5, device=device)
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
        for _ in range(5):
            step(x)
        step.evaluate(x)
        before = snapshot(model, optimizer)
        with pytest.raises(graphfsdp.CaptureError, match="_local_scalar_dense"):
            step.evaluate(x)
        assert_same_state(before, snapshot(model, optimizer))
        assert model.drop.training
        step(x)
    with pytest.raises(graphfsdp.PhaseError, match="closed"):
        step.evaluate(x)


def weighted(model: nn.Module, optimizer: FusedAdam, numbers: list[float]) -> Any:
    """Return a step whose evaluation takes a number from Python."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x).square().mean()
        return out if model.training else out * numbers[0]

    return graphfsdp.capture(model, optimizer, loss_fn=loss_fn, warmup_steps=1)


def linear(device: torch.device) -> tuple[nn.Module, FusedAdam, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 1).to(device)
    x = torch.randn(4, 5, device=device)
    return model, FusedAdam(model.parameters(), lr=0.1), x


def test_a_number_that_differs_in_each_evaluation_is_refused(device: torch.device) -> None:
    """A replay would freeze it; training goes on."""
    model, optimizer, x = linear(device)
    numbers = [2.0]
    with weighted(model, optimizer, numbers) as step:
        step(x)
        plain = model(x).square().mean().detach()
        assert torch.equal(step.evaluate(x), plain * 2)
        # The second differs from the first, and is taken for a warm-up; the third, too, is refused.
        numbers[0] = 4.0
        assert torch.equal(step.evaluate(x), plain * 4)
        numbers[0] = 5.0
        with pytest.raises(graphfsdp.CaptureError, match="mul"):
            step.evaluate(x)
        assert model.training
        for _ in range(3):
            step(x)
        assert step.phase is Phase.REPLAY


def test_numbers_that_evaluations_take_off_a_list_are_refused(device: torch.device) -> None:
    model, optimizer, x = linear(device)
    numbers = [3.0] * 20

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x).square().mean()
        return out if model.training else out * numbers.pop(0)

    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, warmup_steps=1) as step:
        step.evaluate(x)
        with pytest.raises(graphfsdp.CaptureError, match="closure variable 'numbers'"):
            step.evaluate(x)
        assert model.training
        assert len(numbers) == 19


def test_a_number_that_was_changed_once_costs_one_more_eager_evaluation(
    device: torch.device,
) -> None:
    model, optimizer, x = linear(device)
    numbers = [2.0]
    with weighted(model, optimizer, numbers) as step:
        plain = model(x).square().mean().detach()
        assert torch.equal(step.evaluate(x), plain * 2)
        numbers[0] = 3.0
        for _ in range(3):  # refused and run eagerly, captured, replayed
            assert torch.equal(step.evaluate(x), plain * 3)
        for _ in range(10):
            x = torch.randn_like(x)
            assert torch.equal(step.evaluate(x), model(x).square().mean() * 3)


@on_ranks("ranks2")
def test_ranks_warm_an_evaluation_up_together() -> None:
    model = make_net("optim_grads_params")
    optimizer = FusedAdam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    numbers = [2.0 if dist.get_rank() else 3.0]
    batch = my_part(token_batches(1)[0])

    def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
        out: Tensor = model(*batch)
        return out if model.training else out * numbers[0]

    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, warmup_steps=1) as step:
        first = step.evaluate(*batch)
        numbers[0] = 3.0
        second = step.evaluate(*batch)  # a number is another one on rank 1: all warm up again
        third = [step.evaluate(*batch) for _ in range(3)]
        assert all(torch.equal(one, second) for one in third)
        torch.testing.assert_close(first / (2 if dist.get_rank() else 3), second / 3)
