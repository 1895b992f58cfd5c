"""`capture_in_place`: a loop over sharded weights, with and without it, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from helpers import NUM_STEPS
from ranks import on_ranks, rank_device


def trained(captured: bool, clips: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    graphfsdp.fully_shard(model[0])
    graphfsdp.fully_shard(model)
    # What a GPU's is turned into; one made otherwise rounds otherwise.
    options: dict[str, Any] = {"lr": 1e-2}
    if rank_device().type == "cuda":
        options = {"lr": torch.tensor(1e-2, device=rank_device()), "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    found = graphfsdp.capture_in_place(model, optimizer, keep="all") if captured else None
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(NUM_STEPS + 1):
        x, y = torch.randn(6, 8).to(rank_device()), torch.randint(4, (6,)).to(rank_device())
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    if found is not None:
        assert found.phase is graphfsdp.Phase.EAGER
        found.close()
    params: list[Any] = list(model.parameters())
    return losses, [param.full_tensor() for param in params]


@pytest.mark.parametrize("clips", [False, True])
@on_ranks("ranks2")
def test_a_sharded_loop_trains_as_without_the_line(clips: bool) -> None:
    losses, params = trained(captured=False, clips=clips)
    own_losses, own_params = trained(captured=True, clips=clips)
    assert own_losses == losses
    assert all(map(torch.equal, own_params, params))
