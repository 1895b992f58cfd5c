"""Parts on a GPU: forward and backward passes as graphs, bit for bit as without them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import graphfsdp
from graphfsdp.in_place.parts import Parts

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(nn.functional.gelu(self.norm(self.embed(x))))
        logits: Tensor = self.head(hidden)
        return logits + torch.cat([hidden @ self.embed.weight[:, :2], hidden[:, :2]], dim=1)


def batches(count: int = 12) -> Iterator[tuple[int, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        x = torch.randn(8, 6, generator=generator)
        yield index, x.cuda(), torch.randint(4, (8,), generator=generator).cuda()


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


def run(loop: Any, captured: bool) -> tuple[list[float], list[Tensor], Parts | None]:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    parts = graphfsdp.capture_in_place(model, optimizer, keep="all") if captured else None
    losses = [float(loss) for loss in loop(model, optimizer)]
    state = [t.clone() for t in model.state_dict().values()]
    state += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state += [t for entries in optimizer.state.values() for t in entries.values()]
    return losses, [*state, torch.cuda.get_rng_state()], parts


@pytest.mark.parametrize("loop", [plain, two_calls, other_gradients, casts])
def test_a_loop_trains_as_without_it(loop: Any) -> None:
    losses, state, _ = run(loop, False)
    found_losses, found, parts = run(loop, True)
    assert losses == found_losses
    assert all(torch.equal(one, other) for one, other in zip(state, found, strict=True))
    assert parts is not None
    assert parts.report().parts[0].num_replays >= 8
    parts.close()


def test_what_a_part_cannot_hold_leaves_the_loop_and_later_parts_as_they_are() -> None:
    run(reads, False)
    losses, _, _ = run(plain, False)
    assert run(plain, True)[0] == losses
