"""The ring of metrics: on the device in every step, on the host once in many."""

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import MetricRing
from graphfsdp.optim import FusedAdam
from helpers import no_host_sync

NUM_STEPS = 23


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)


def train(device: torch.device, scope: str, num_kept: int, *, inside: bool) -> list[list[float]]:
    """Return what the ring says in reads after 5 pushes each, and at the end."""
    model = make_model(device)
    ring = MetricRing(["loss", "largest"], num_kept, device=device)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        loss, largest = out.square().mean(), out.detach().abs().max()
        if inside:
            ring.push(loss=loss, largest=largest)
        return loss, largest

    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    rows, seen = [], []
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
        for index in range(NUM_STEPS):
            loss, largest = step(torch.randn(6, 4).to(device))
            if not inside:
                ring.push(loss=loss, largest=largest)
            seen.append([float(loss), float(largest)])
            if index % 5 == 4:
                rows += [[row["loss"], row["largest"]] for row in ring.read()]
        rows += [[row["loss"], row["largest"]] for row in ring.read()]
    if num_kept >= 5:
        assert rows == seen
        assert ring.num_lost == 0
    else:
        assert rows == [seen[i] for i in range(NUM_STEPS) if i % 5 >= 5 - num_kept or i >= 20]
        assert ring.num_lost == 4 * (5 - num_kept)
    return rows


@pytest.mark.parametrize("num_kept", [3, 5, 64])
@pytest.mark.parametrize("inside", [True, False])
def test_every_metric_is_read_bit_for_bit_in_order(
    num_kept: int, inside: bool, device: torch.device
) -> None:
    expected = train(device, "none", num_kept, inside=inside)
    assert train(device, "full_iteration", num_kept, inside=inside) == expected


def test_a_push_waits_for_nothing(device: torch.device) -> None:
    ring = MetricRing(["loss"], 4, device=device)
    loss = torch.ones((), device=device)
    with no_host_sync(device):
        ring.push(loss=loss)
    assert ring.read() == [{"loss": 1.0}]
    assert ring.read() == []


def test_a_push_keeps_no_graph_and_any_dtype(device: torch.device) -> None:
    ring = MetricRing(["a", "b"], 2, device=device)
    weight = torch.ones(1, device=device, requires_grad=True)
    ring.push(a=weight * 3, b=torch.tensor(2**24 + 1, device=device))
    assert ring.read() == [{"a": 3.0, "b": 2.0**24 + 1}]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": torch.ones(())}, "keeps loss, norm; got loss"),
        ({"loss": torch.ones(()), "norm": 1.0}, "'norm' is a float"),
        ({"loss": torch.ones(2), "norm": torch.ones(())}, r"'loss' has shape \(2,\)"),
    ],
)
def test_other_metrics_are_refused(metrics: dict[str, Tensor], message: str) -> None:
    with pytest.raises(graphfsdp.ConfigError, match=message):
        MetricRing(["loss", "norm"], 2).push(**metrics)


@pytest.mark.parametrize(("names", "num_steps"), [([], 2), (["a", "a"], 2), (["a"], 0)])
def test_a_ring_without_names_or_rows_is_refused(names: list[str], num_steps: int) -> None:
    with pytest.raises(graphfsdp.ConfigError):
        MetricRing(names, num_steps)
