"""Batches of several kinds: a graph for each, in any order, bit for bit the eager run."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, assert_same_states, snapshot

LENGTHS = (4, 6, 4, 6, 8, 4, 8, 6, 4, 8, 8, 6, 4, 3, 6, 8, 4, 6, 8, 4)


class Model(nn.Module):
    """Any number of rows of any length; draws from the generator, updates statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.last(self.drop(hidden.relu()))
        return out.square().mean()


def train(
    device: torch.device, lengths: tuple[int, ...] = LENGTHS, rows: int = 4, **options: Any
) -> tuple[list[dict[str, Tensor]], graphfsdp.CaptureReport]:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    states = []
    with graphfsdp.capture(model, optimizer, max_grad_norm=1.0, **options) as step:
        for index, length in enumerate(lengths):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)
            x = torch.randn(rows, length, 5, generator=generator).to(device)
            loss = step(x)
            states.append({"loss": loss, **snapshot(model, optimizer)})
        return states, step.report()


def test_a_graph_for_each_kind_of_batch_in_any_order(device: torch.device) -> None:
    expected, _ = train(device, scope="none", on_change="recapture")
    got, report = train(device, on_change="recapture")
    assert_same_states(expected, got)
    # Lengths 4, 6 and 8 were captured when they came after the warm-up for the second time;
    # length 3 has come once.
    assert report.num_captures == 3
    assert report.num_calls == {"warmup": 5, "capture": 3, "replay": len(LENGTHS) - 8}


def test_graphs_are_given_up_least_recently_used_first(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = (4,) * 5 + (6,) * 3 + (4, 8, 8, 8, 4, 6, 6, 6, 4)
    expected, _ = train(device, lengths, scope="none", on_change="recapture", max_graphs=2)
    with caplog.at_level(logging.INFO, logger="graphfsdp"):
        got, report = train(device, lengths, on_change="recapture", max_graphs=2)
    assert_same_states(expected, got)
    # 8 displaced 6, and then 6 displaced 8; 4 was always the one that had been used later.
    assert report.num_captures == 4
    assert caplog.text.count("given up: there are more than max_graphs=2") == 2


def test_more_kinds_than_graphs_taking_turns_are_warned_of_once(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="graphfsdp"):
        _, report = train(device, (4, 6, 8) * 5, on_change="recapture", max_graphs=2)
    assert report.num_captures == 0
    assert caplog.text.count("more than max_graphs=2 kinds of batches take turns") == 1
    assert "Remedy: max_graphs=4 or more" in caplog.text


def test_a_strange_batch_runs_eagerly_and_the_graph_stays(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = (4,) * 6 + (3, 4, 4, 7, 3, 4) + (4,) * 6
    expected, _ = train(device, lengths, scope="none", on_change="eager")
    with caplog.at_level(logging.INFO, logger="graphfsdp"):
        got, report = train(device, lengths, on_change="eager")
    assert_same_states(expected, got)
    assert report.num_captures == 1
    assert report.num_calls == {"warmup": 3, "capture": 1, "replay": 11, "eager": 3}
    assert "running eagerly: batch leaf args[0]: expected" in caplog.text


@pytest.mark.parametrize("policy", ["recapture", "eager"])
def test_the_number_of_microbatches_may_change(policy: str, device: torch.device) -> None:
    numbers = (1, 1, 1, 1, 2, 2, 2, 1, 4, 4, 2, 1, 4, 2, 1, 1)

    def run(scope: str) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Model().to(device)
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        states = []
        with graphfsdp.capture(model, optimizer, scope=scope, on_change=policy) as step:
            for number in numbers:
                step.microbatches = number
                loss = step(torch.randn(4, 3, 5).to(device))
                states.append({"loss": loss, **snapshot(model, optimizer)})
        return states

    assert_same_states(run("none"), run("full_iteration"))


def test_another_number_of_microbatches_is_refused_by_default(device: torch.device) -> None:
    model = Model().to(device)
    x = torch.randn(4, 3, 5, device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
        step(x)
        step.microbatches = 2
        with pytest.raises(graphfsdp.BatchMismatchError, match="microbatches was 1 and is now 2"):
            step(x)
        step.microbatches = 1
        step(x)
        with pytest.raises(graphfsdp.ConfigError, match="microbatches"):
            step.microbatches = 0


def test_a_new_kind_of_batch_that_cannot_be_captured_leaves_the_other_graphs(
    device: torch.device,
) -> None:
    model = Model().to(device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.item() if x.shape[1] == 6 else loss

    optimizer = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, on_change="recapture") as step:
        for _ in range(5):
            step(torch.randn(4, 3, 5, device=device))
        step(torch.randn(4, 6, 5, device=device))
        before = snapshot(model, optimizer)
        with pytest.raises(graphfsdp.CaptureError):
            step(torch.randn(4, 6, 5).to(device))
        after = snapshot(model, optimizer)
        after["generator of the cpu"] = before["generator of the cpu"]  # drew the batch
        assert_same_state(before, after)
        assert step.phase is Phase.REPLAY
        step(torch.randn(4, 3, 5, device=device))
        assert step.report().num_calls["replay"] == 2


def test_graphs_share_one_pool(device: torch.device) -> None:
    """Together they need what the largest needs, evaluation included."""

    def pool_bytes(lengths: tuple[int, ...], *, evaluates: bool = False) -> int:
        torch.manual_seed(0)
        model = Model().to(device)
        with graphfsdp.capture(model, FusedAdam(model.parameters()), on_change="recapture") as step:
            for length in lengths:
                x = torch.randn(64, length, 5).to(device)
                step(x)
                if evaluates:
                    step.evaluate(x)
            return step.report().pool_bytes

    largest = pool_bytes((128,) * 5)
    assert largest > 100_000
    together = pool_bytes((96,) * 5 + (128,) * 3 + (64,) * 3 + (96,), evaluates=True)
    assert together <= 1.05 * largest
