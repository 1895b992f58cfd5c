"""What a script holds of parameters, or puts in their place, before the first forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import graphfsdp
from counting_net import mean_square
from ranks import on_ranks, rank_device
from sharding_helpers import STRATEGIES, adam, on_meta, raises_on_rank, train

WIDTH = 4


def stack(strategy: str = "optim_grads_params", *, meta: bool = False) -> Any:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))

    torch.manual_seed(0)
    model: Any = on_meta(make) if meta else make().to(rank_device())
    for layer in model:
        graphfsdp.fully_shard(layer, strategy=strategy)
    graphfsdp.fully_shard(model, strategy=strategy)
    if meta:
        model.to_empty(device=rank_device())
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
    return model


def detached(model: nn.Module) -> dict[str, Any]:
    return {name: param.detach() for name, param in model.named_parameters()}


def slices(model: nn.Module) -> dict[str, Any]:
    """Views of views, of which no parameter knows."""
    return {name: param.to_local()[:1] for name, param in detached(model).items()}


TAKES: tuple[Callable[[nn.Module], dict[str, Any]], ...] = (nn.Module.state_dict, detached, slices)


def parts(values: dict[str, Any]) -> list[Tensor]:
    return [getattr(value, "_local_tensor", value).clone() for value in values.values()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_what_is_held_follows_the_training(strategy: str) -> None:
    """Whenever it was taken, and captured: a state dict is often taken once and saved later."""
    data = [(torch.randn(2, WIDTH, device=rank_device()),) for _ in range(5)]
    for when in ("at once", "on meta", "behind .to", "behind a load", "inside a root"):
        root = model = stack(strategy, meta=when == "on meta")
        if when == "behind .to":
            model.to(rank_device())
        if when == "behind a load":
            model.load_state_dict(model.state_dict(), assign=True)
        if when == "inside a root":  # which the first forward of its parts did not know
            mean_square(model, data[0][0]).backward()
        held = [take(model) for take in TAKES]
        if when == "inside a root":
            root = graphfsdp.fully_shard(nn.Sequential(model), strategy=strategy)
        before = parts(held[2])
        train(root, adam(root), data=data, loss_fn=mean_square)
        for values, take in zip(held, TAKES, strict=True):
            now = parts(take(model))
            for index, local in enumerate(parts(values)):
                assert torch.equal(local, now[index]), f"{take.__name__} {when}: {index}"
        for old, new in zip(before, parts(held[2]), strict=True):
            assert not old.numel() or not torch.equal(old, new), when


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(shard: Any, *, loads_first: bool) -> Any:
    """As torchtune does it: values for the base, memory for the adapters' modules alone."""
    model = on_meta(Adapted)
    shard(model)
    value = torch.arange(16.0, device=rank_device()).view(WIDTH, WIDTH)
    like = model.base.weight

    def load() -> None:
        whole = torch.distributed.tensor.distribute_tensor(value, like.device_mesh, like.placements)
        model.load_state_dict({"base.weight": whole}, strict=False, assign=True)

    if loads_first:
        load()
    for index, module in enumerate((model.down, model.up)):
        module.to_empty(device=rank_device())
        for param in module.parameters():
            nn.init.constant_(param, 0.5 + index)
    if not loads_first:
        load()
    return model


@pytest.mark.parametrize("loads_first", [True, False])
@on_ranks("ranks2")
def test_modules_inside_a_unit_are_given_memory_one_by_one(loads_first: bool) -> None:
    x = torch.ones(2, WIDTH, device=rank_device())
    theirs = adapted(torch_fully_shard, loads_first=loads_first)
    for _ in range(2):
        ours = adapted(graphfsdp.fully_shard, loads_first=loads_first)
        graphfsdp.fully_shard(nn.Sequential(ours))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
        losses = []
        for model, optim in zip((theirs, ours), optimizers, strict=True):
            for _ in range(2):
                loss = mean_square(model, x)
                loss.backward()
                optim.step()
                optim.zero_grad()
            losses.append(loss)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        theirs = adapted(torch_fully_shard, loads_first=loads_first)


@on_ranks("ranks2")
def test_what_has_no_values_is_named_beside_what_has() -> None:
    model = on_meta(Adapted)
    graphfsdp.fully_shard(model)
    model.down.to_empty(device=rank_device())
    with raises_on_rank(graphfsdp.ConfigError, "'base.weight' was made on the meta device"):
        model(torch.ones(2, WIDTH, device=rank_device()))
    model = graphfsdp.fully_shard(Adapted().to(rank_device()))
    model.down.double()
    with raises_on_rank(graphfsdp.ConfigError, "'down.weight' does not lie in the buffers"):
        model(torch.ones(2, WIDTH, device=rank_device()))
