"""Parts on a GPU: forward and backward passes as graphs, bit for bit as without them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parts_helpers import Loop, Net, check, make_net, of_logits, trains_by
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


def two_calls(model: Net, _: int, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model(x), y) + cross_entropy(model(-x), y)
    return loss + 0.1 * model.embed.weight.pow(2).sum() + model.embed.weight.abs().sum()


def other_gradients(model: Net, index: int, x: Tensor, y: Tensor) -> Tensor:
    """Gradients that come in several forms, one of them without memory for each element."""
    logits: Tensor = model(x)
    found = [logits.sum(), logits.t().contiguous().pow(2).sum(), cross_entropy(logits, y)]
    return found[index % 3]


def casts(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for _, x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss


class Around(nn.Module):
    """A model that looks at its numbers, around one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = on_gpu()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits if logits.sum().item() > 0 else logits * 0.5


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "two calls": trains_by(two_calls, device="cuda"),
    "other gradients": trains_by(other_gradients, 20, device="cuda"),
    "casts": casts,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_without_it(name: str) -> None:
    with check(LOOPS[name], on_gpu) as parts:
        assert parts.report().parts[0].num_replays >= 8


def test_what_a_part_cannot_hold_leaves_the_loop_and_later_parts_as_they_are() -> None:
    with check(trains_by(of_logits, device="cuda"), Around) as parts:
        assert [part.state for part in parts.report().parts][:2] == ["as written", "captured"]
    check(plain, on_gpu).close()
