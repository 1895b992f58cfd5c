"""What the parameters of a sharded module can do: full_tensor, state_dict, torch's clipping."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from graphfsdp.sharding.placement import RowShard
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Net,
    adam,
    batches,
    full_parameters,
    gradients,
    make_net,
    my_part,
    shard,
    units,
)

NUM_STEPS = 5


@on_ranks("ranks2")
def test_parameters_keep_what_their_owner_put_on_them() -> None:
    model = Net()
    model.scale.tag = "owner"  # type: ignore[attr-defined]
    model.embedding.weight.is_embedding = True  # type: ignore[attr-defined]
    shard(model, "optim_grads_params")
    assert model.scale.tag == "owner"  # type: ignore[attr-defined]
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.is_embedding  # type: ignore[attr-defined]
    assert isinstance(model.scale, nn.Parameter)
    assert isinstance(model, Net)
    assert not model.frozen.requires_grad


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_full_tensor_is_right_for_uneven_rows(strategy: str) -> None:
    """Of parameters, gradients, and what the state_dict and detach() make of parameters."""
    model = make_net(strategy)
    plain = make_net(None)
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.shape == expected[name].shape
        assert torch.equal(param.full_tensor().cpu(), expected[name]), name
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor().cpu(), plain.state_dict()[name]), (
            f"state_dict: {name}"
        )
    model(*my_part(batches(1)[0])).backward()
    by_hand = gradients(model)
    for unit in units(model):
        for item in unit.group.trainable:
            name = f"{unit.group.name}.{item.name}".lstrip(".")
            holders = torch.tensor(float(item.param.grad is not None), device=rank_device())
            dist.all_reduce(holders)
            if float(holders) == dist.get_world_size():  # a collective needs every rank
                grad: Any = item.param.grad
                assert torch.equal(grad.full_tensor().cpu(), by_hand[name].cpu()), (
                    f"gradient of {name}"
                )
    assert len(by_hand) >= 12


class Recurrent(nn.Module):
    """An LSTM as a unit: torch keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(4, 5, batch_first=True)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[0](x)[0]).square().mean()
        return out


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks("ranks2")
def test_an_lstm_can_be_a_unit(strategy: str) -> None:
    runs = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Recurrent().to(rank_device())
        if sharded:
            shard(model, strategy)
        optim = adam(model, "adamw")
        generator = torch.Generator().manual_seed(1)  # equal on all ranks: the mean is the same
        losses = []
        for _ in range(NUM_STEPS):
            loss = model(torch.randn(2, 3, 4, generator=generator).to(rank_device()))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        runs.append((torch.stack(losses), full_parameters(model)))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-5, atol=1e-6)
    for name, whole in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], whole, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks("ranks2")
def test_torch_never_takes_what_it_knows_of_plain_shards_for_theirs(strategy: str) -> None:
    """As if hashes had come close to those of plain shards, by the addresses of a process."""
    own_hash = RowShard.__hash__
    RowShard.__hash__ = lambda self: hash(Shard(0))  # type: ignore[method-assign]
    try:
        model = make_net(strategy)
        expected = dict(make_net(None).named_parameters())
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            if not param.ndim:
                continue
            plain = distribute_tensor(expected[name].detach(), param.device_mesh, [Shard(0)])
            for tensor in (plain, param, plain):  # each finds what was worked out for the other
                whole: Any = tensor.detach()
                assert torch.equal(whole.full_tensor(), expected[name]), name
    finally:
        RowShard.__hash__ = own_hash  # type: ignore[method-assign]
