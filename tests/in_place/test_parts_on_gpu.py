"""Parts on a GPU: forward and backward passes as graphs, bit for bit as without them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import graphfsdp
from parts_helpers import Net, check, make_net, run
from parts_helpers import batches as batches_on

pytestmark = pytest.mark.gpu

batches = partial(batches_on, device="cuda")


def on_gpu() -> Net:
    return make_net().cuda()


def plain(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        yield loss.item()
        loss.backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def two_calls(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y) + cross_entropy(model(-x), y)
        loss = loss + 0.1 * model.embed.weight.pow(2).sum() + model.embed.weight.abs().sum()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def other_gradients(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Gradients that come in several forms, one of them without memory for each element."""
    for index, x, y in batches(20):
        optimizer.zero_grad()
        logits = model(x)
        loss = [logits.sum(), logits.t().contiguous().pow(2).sum(), cross_entropy(logits, y)]
        loss[index % 3].backward()
        optimizer.step()
        yield loss[index % 3].detach()


def casts(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for _, x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach()


def reads(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """A model that looks at its numbers, around one that does not."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.net(x)
            return logits if logits.sum().item() > 0 else logits * 0.5

    around = Around()
    parts = graphfsdp.capture_in_place(around, optimizer, keep="all")
    for _, x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(around(x), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()
    assert [part.state for part in parts.report().parts][:2] == ["as written", "captured"]
    parts.close()


@pytest.mark.parametrize("loop", [plain, two_calls, other_gradients, casts])
def test_a_loop_trains_as_without_it(loop: Any) -> None:
    with check(loop, on_gpu) as parts:
        assert parts.report().parts[0].num_replays >= 8


def test_what_a_part_cannot_hold_leaves_the_loop_and_later_parts_as_they_are() -> None:
    run(reads, False, on_gpu)
    check(plain, on_gpu).close()
