"""Evaluation between training steps: right numbers, and training as if it had not been."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_run, assert_same_state, count_forwards, run, snapshot
from ranks import on_ranks
from sharding_helpers import batches as token_batches
from sharding_helpers import make_net, my_part
from zoo import features
from zoo_models import Statistical

# How many evaluations follow each training step, in turn: none, several, several kinds.
PATTERN = ((), ("a",), ("a", "a", "b"), ("b",), (), ("c", "a"), ("a", "b"))
ROWS = {"a": 6, "b": 4, "c": 1}


class Model(Statistical):
    """Where training and evaluation differ in everything that can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(8).eval()  # a mode of its own

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.frozen(self.drop(self.norm(self.first(x)).relu()))
        out: Tensor = self.last(hidden)
        return out.square().mean(), out


Loss = Callable[..., Any]


def loss_with_draws(model: nn.Module, x: Tensor) -> Any:
    return model(x + torch.rand_like(x))


def evaluated_by_hand(model: nn.Module, x: Tensor, loss_fn: Loss = nn.Module.__call__) -> Any:
    """What users write; leaves modes and generators as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        result = loss_fn(model, x)
    for module, training in modes:
        module.training = training
    return result


@pytest.fixture
def model(device: torch.device) -> Model:
    return Model().to(device)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(6, 5, device=device)


def captured(model: nn.Module, **options: Any) -> graphfsdp.CapturedStep:
    return graphfsdp.capture(model, FusedAdam(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("scope", ["full_iteration", "forward_backward", "none"])
def test_training_is_bit_for_bit_that_without_evaluation(scope: str, device: torch.device) -> None:
    """Also where evaluation draws: the generator is left alone."""
    others = {key: torch.randn(rows, 5).to(device) for key, rows in ROWS.items()}

    def evaluate(step: Any, model: Any, index: int) -> None:
        for key in PATTERN[index % len(PATTERN)]:
            got = step.evaluate(others[key])
            want = evaluated_by_hand(model, others[key], loss_with_draws)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
            assert not got[0].requires_grad
            assert not model.frozen.training
            assert model.drop.training

    case = Case(Model, features(5), loss_with_draws)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "num_steps": 18}
    expected = run(case, "none", device, **options)
    assert_same_run(expected, run(case, scope, device, between=evaluate, **options))


def test_evaluation_before_the_first_step_and_by_replay(model: Model, x: Tensor) -> None:
    num_forwards = count_forwards(model)
    with captured(model) as step:
        for num_kinds, rows in enumerate(ROWS.values(), start=1):
            results = [step.evaluate(x[:rows])[1] for _ in range(12)]
            assert num_forwards() == 2 * num_kinds  # of each kind eagerly once, recorded once
            assert all(torch.equal(results[0], result) for result in results)
            assert len({result.data_ptr() for result in results}) == len(results)
        assert step.phase is Phase.WARMUP
        assert all(param.grad is None for param in model.parameters())


def test_microbatches_of_an_evaluation_give_the_mean_loss(model: Model, x: Tensor) -> None:
    with captured(model, microbatches=3) as step:
        for _ in range(3):
            loss, out = step.evaluate(x)
            want, rows = evaluated_by_hand(model, x)
            torch.testing.assert_close(loss, want)
            torch.testing.assert_close(out.flatten(0, 1), rows)


def move_buffers(model: Model) -> None:
    model.norm.running_mean = torch.full_like(model.norm.running_mean, 0.5)  # type: ignore[arg-type]


def replace_a_module(model: Model) -> None:
    model.drop = nn.Dropout(0.5)
    model.last = nn.Linear(8, 1).to(model.first.weight.device)


@pytest.mark.parametrize("change", [move_buffers, replace_a_module])
def test_evaluation_follows_a_model_that_has_changed(
    change: Callable[[Model], None], model: Model, x: Tensor
) -> None:
    with captured(model) as step:
        for index in range(9):
            if index == 4:
                change(model)
            if index == 6:
                model.eval()  # as before an evaluation by hand
            got, want = step.evaluate(x), evaluated_by_hand(model, x)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), index


def test_an_evaluation_that_cannot_be_captured_is_refused_and_leaves_no_trace(
    model: Model, x: Tensor
) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)[0]
        return loss if model.training else loss * loss.item()

    optimizer = FusedAdam(model.parameters())
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


def weighted_by(number: Callable[[], float]) -> Loss:
    """Return a loss function that takes a number from Python when it evaluates."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
        out: Tensor = model(*batch)
        loss = out.square().mean()
        return loss if model.training else loss * number()

    return loss_fn


@pytest.mark.parametrize(
    ("given", "refused_at"),
    [
        # The second differs from the first, and is taken for a warm-up; the third, too, is refused.
        ([2.0, 4.0, 5.0], 2),
        # Refused and run eagerly, captured, replayed.
        ([2.0] + 13 * [3.0], None),
    ],
)
def test_a_number_may_change_once_and_is_refused_if_each_evaluation_has_another(
    given: list[float], refused_at: int | None, x: Tensor
) -> None:
    """A replay would freeze it; training goes on."""
    model = nn.Linear(5, 1).to(x.device)
    numbers = [0.0]
    with captured(model, loss_fn=weighted_by(lambda: numbers[0]), warmup_steps=1) as step:
        step(x)
        for index, number in enumerate(given):
            x = torch.randn_like(x)
            numbers[0] = number
            is_refused = index == refused_at
            with (
                pytest.raises(graphfsdp.CaptureError, match="mul") if is_refused else nullcontext()
            ):
                assert torch.equal(step.evaluate(x), model(x).square().mean() * number)
            assert model.training
        for _ in range(2):
            step(x)
        assert step.phase is Phase.REPLAY


def test_numbers_that_evaluations_take_off_a_list_are_refused(x: Tensor) -> None:
    model = nn.Linear(5, 1).to(x.device)
    numbers = [3.0] * 20
    loss_fn = weighted_by(lambda: numbers.pop(0))
    with captured(model, loss_fn=loss_fn, warmup_steps=1) as step:
        step.evaluate(x)
        with pytest.raises(graphfsdp.CaptureError, match="closure variable 'numbers'"):
            step.evaluate(x)
        assert model.training
        assert len(numbers) == 19


@on_ranks("ranks2")
def test_ranks_warm_an_evaluation_up_together() -> None:
    model = make_net("optim_grads_params")
    numbers = [2.0 if dist.get_rank() else 3.0]
    batch = my_part(token_batches(1)[0])
    loss_fn = weighted_by(lambda: numbers[0])
    optimizer = FusedAdam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, warmup_steps=1) as step:
        first = step.evaluate(*batch)
        numbers[0] = 3.0
        second = step.evaluate(*batch)  # a number is another one on rank 1: all warm up again
        third = [step.evaluate(*batch) for _ in range(3)]
        assert all(torch.equal(one, second) for one in third)
        torch.testing.assert_close(first / (2 if dist.get_rank() else 3), second / 3)
