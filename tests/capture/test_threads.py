"""Two threads with a step each, on one device: what one captures, the other does not see."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase, PhaseError
from graphfsdp.optim import FusedAdam

NUM_CALLS = 9  # of which the fifth captures again in the threads
NUM_ROUNDS = 3


def train(
    device: torch.device, seed: int, scope: str, both: threading.Barrier | None = None
) -> list[Tensor]:
    """Return losses, an evaluation and weights; the threads begin each warm-up at once."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(drawn(*param.shape))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    got = []
    with graphfsdp.capture(
        model,
        optimizer,
        loss_fn=lambda net, x: net(x).square().mean(),
        scope=scope,
        on_change="recapture",
    ) as step:
        for index in range(NUM_CALLS):
            if both is not None and index < 4:
                both.wait()
            got.append(step(drawn(16 if index < 5 else 4, 8)))
        got.append(step.evaluate(drawn(4, 8)))
        assert scope == "none" or step.phase is Phase.REPLAY
    return [*got, *(param.detach().clone() for param in model.parameters())]


def test_two_threads_that_capture_on_one_device_train_as_each_alone(device: torch.device) -> None:
    expected = [train(device, seed, "none") for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(NUM_ROUNDS):
            both = threading.Barrier(2)
            runs = [threads.submit(train, device, 1 + n, "full_iteration", both) for n in (0, 1)]
            for run, wanted in zip(runs, expected, strict=True):
                assert all(map(torch.equal, run.result(), wanted))


def test_a_turn_that_does_not_come_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfsdp.base.streams._TURN_LIMIT_S", 0.05)
    model = nn.Linear(8, 1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        other.submit(train, torch.device("cpu"), 1, "full_iteration").result()
        loss: Tensor = model(x).mean()
        return loss

    step = graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn)
    with (
        ThreadPoolExecutor(1) as other,
        pytest.raises(PhaseError, match=r"another thread .* Remedy"),
    ):
        step(torch.ones(4, 8))
