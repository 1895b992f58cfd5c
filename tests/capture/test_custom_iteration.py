"""iteration=fn: whole iterations of the user's own, bit for bit the plain loop."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_states, make_optimizer, run_as_eager, snapshot
from hidden_count import Unseen
from iterations import ITERATIONS, gan, make_trained, train_by
from zoo import features

Optimizer = torch.optim.Optimizer


def made(name: str, device: torch.device, first: str = "fused_adam") -> tuple[list[nn.Module], Any]:
    return make_trained(
        *(name, device),
        *(
            lambda model, kind=kind: make_optimizer(kind, model.parameters(), device)
            for kind in (first, "fused_adam")
        ),
    )


@pytest.mark.parametrize(
    ("name", "first"), [("gan", "sgd"), *((name, "fused_adam") for name in ITERATIONS)]
)
def test_replays_are_bit_for_bit_the_plain_loop(
    name: str, first: str, device: torch.device
) -> None:
    def train(scope: str | None) -> list[dict[str, Tensor]]:
        models, optimizers = made(name, device, first)
        every = optimizers if isinstance(optimizers, list) else [optimizers]

        def state_of() -> dict[str, Tensor]:
            return {
                f"model {at}: {key}": tensor
                for at, model in enumerate(models)
                for key, tensor in snapshot(model, every[min(at, len(every) - 1)]).items()
            }

        data = (torch.randn(8, 6).to(device) for _ in range(16))
        return train_by(name, models, optimizers, data, scope, state_of)

    plain = train(None)
    for scope in ("none", "full_iteration"):
        assert_same_states(plain, train(scope), scope)


@pytest.mark.parametrize("decoupled", [False, True])
def test_gradients_of_another_dtype_are_bound_between_backwards(
    decoupled: bool, device: torch.device
) -> None:
    """bf16 weights with float32 gradients; two steps of one optimizer in one iteration."""

    def iteration(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        for part in x.chunk(2):
            optimizer.zero_grad()
            for row in part.chunk(2):
                loss = mean_square(model, row.bfloat16())
                loss.backward()
            optimizer.step()
        return loss

    def optimizer(params: list[nn.Parameter]) -> Optimizer:
        return FusedAdam(params, lr=1e-2, master_weights=True, use_decoupled_grad=decoupled)

    case = Case(lambda: nn.Linear(4, 4, dtype=torch.bfloat16), features(4))
    run_as_eager(case, device, optimizer=optimizer, iteration=iteration)


def test_evaluation_and_verification_of_a_custom_iteration(device: torch.device) -> None:
    models, optimizers = made("gan", device)

    def loss_fn(models: Sequence[nn.Module], real: Tensor) -> Tensor:
        loss: Tensor = models[1](real).mean()
        return loss

    with graphfsdp.capture(
        models, optimizers, iteration=gan, loss_fn=loss_fn, verify=4, on_change="recapture"
    ) as step:
        for index in range(12):
            step(torch.randn(8 if index % 3 else 5, 6).to(device))
            real = torch.randn(8, 6).to(device)
            models[1].eval()
            with torch.no_grad():
                expected = models[1](real).mean()
            models[1].train()
            assert torch.equal(step.evaluate(real), expected)
        step.verify(2)


def test_changes_of_every_optimizer_are_noticed(device: torch.device) -> None:
    models, optimizers = made("gan", device, "sgd")
    with graphfsdp.capture(models, optimizers, iteration=gan) as step:
        for _ in range(5):
            step(torch.randn(8, 6).to(device))
        optimizers[0].param_groups[0]["momentum"] = 0.5
        with pytest.raises(graphfsdp.GuardError, match=r"momentum"):
            step(torch.randn(8, 6).to(device))


def test_an_optimizer_that_no_replay_steps_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def iteration(models: Any, optimizers: Any, x: Tensor) -> Tensor:
        next(runs)
        loss: Tensor = models[1](models[0](x)).square().mean()
        loss.backward()
        optimizers[1].step()
        if x.shape[0] > 50:
            time.sleep(0.0)  # the clocks of this module are watched
            optimizers[0].step()
        return loss

    runs = Unseen(None)
    models = [nn.Linear(6, 6), nn.Linear(6, 1)]
    optimizers = [torch.optim.SGD(models[0].parameters()), FusedAdam(models[1].parameters())]
    with (
        graphfsdp.capture(models, optimizers, iteration=iteration) as step,
        caplog.at_level(logging.WARNING, logger="graphfsdp"),
    ):
        for _ in range(6):
            step(torch.ones(2, 6))
    told = [record.getMessage() for record in caplog.records if "takes no step" in record.msg]
    assert len(told) == 1
    assert told[0].startswith("optimizer 0 (SGD) takes no step in the captured iteration")
    assert runs.num_calls == 4  # the log line reads a clock, which is not the iteration's


@pytest.mark.parametrize("warmup_steps", [2, 3, 4])
@pytest.mark.parametrize("period", [2, 3])
def test_steps_that_python_counts_are_refused(period: int, warmup_steps: int) -> None:
    """Whichever of the warm-ups and the capture steps: a replay would always, or never again."""

    def iteration(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model.num_calls += 1
        loss: Tensor = model(x).square().mean()
        loss.backward()
        if model.num_calls % period == 0:
            optimizer.step()
        return loss

    model = nn.Sequential(nn.Linear(6, 1))
    model.num_calls = 0  # type: ignore[assignment]
    optimizer = FusedAdam(model.parameters())
    with graphfsdp.capture(
        model, optimizer, iteration=iteration, warmup_steps=warmup_steps
    ) as step:
        with pytest.raises(graphfsdp.CaptureError, match=r"FusedAdam\.step") as caught:  # noqa: PT012
            for _ in range(warmup_steps + 3):
                step(torch.ones(2, 6))
        assert caught.value.kind is graphfsdp.HazardKind.CONTROL_FLOW
        assert step.phase is not graphfsdp.Phase.REPLAY
