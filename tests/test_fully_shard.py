"""fully_shard without capture: the loops, methods and parameters that FSDP2's users know."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import set_lr
from ranks import RankPool, rank_device
from sharding_helpers import (
    MAX_NORM,
    STRATEGIES,
    Block,
    Net,
    Training,
    adam,
    assert_close_to_reference,
    batches,
    buffers,
    full_parameters,
    learning_rate,
    make_net,
    my_part,
    reference,
    shard,
    units,
)

NUM_STEPS = 5


def plain_loop(strategy: str, set_to_none: bool) -> Training:
    """Train as with FSDP2; the clipping is graphfsdp's."""
    model = make_net(strategy)
    optim = adam(model, "adamw")
    result = Training()
    for index, batch in enumerate(batches(NUM_STEPS)):
        set_lr(optim, learning_rate(index))
        loss = model(*my_part(batch))
        loss.backward()
        result.norms.append(graphfsdp.clip_grad_norm_(model, MAX_NORM))
        optim.step()
        optim.zero_grad(set_to_none=set_to_none)
        result.losses.append(loss.detach())
    result.params = full_parameters(model)
    return result


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loop_of_fsdp2_works(ranks2: RankPool, strategy: str, set_to_none: bool) -> None:
    assert_close_to_reference(ranks2.run(plain_loop, strategy, set_to_none), reference(NUM_STEPS))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients by name; every rank must call it."""
    found = {}
    for unit in units(model):
        for item in unit.group.trainable:
            holder: Any = item.main_grad
            rows = 0 if holder is None or item.param.grad is None else 1
            held = torch.tensor(float(rows))
            dist.all_reduce(held)
            if float(held):
                name = f"{unit.group.name}.{item.name}".lstrip(".")
                found[name] = whole_gradient(item)
    return found


def whole_gradient(item: Any) -> Tensor:
    """Gather a gradient by hand from the rows of all ranks."""
    grad = item.param.grad
    rows = None if grad is None else grad.to_local().cpu()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    if not item.buffer.sharded or not item.slot.shape:
        parts = [part for part in parts if part is not None][:1]
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found[0].dim() else found[0]


def accumulates(strategy: str) -> None:
    """Three passes, two without a sync, against one pass of a plain model over all of it."""
    model = make_net(strategy)
    parts = batches(3)
    assert isinstance(model, graphfsdp.FSDPModule)
    with model.no_sync():
        for batch in parts[:2]:
            (model(*my_part(batch)) / 3).backward()
            assert all(param.grad is None for param in model.parameters())
    (model(*my_part(parts[2])) / 3).backward()
    got = gradients(model)
    plain = make_net(None)
    for batch in parts:
        (plain(*(part.to(rank_device()) for part in batch)) / 3).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert set(got) == {name for name, grad in expected.items() if grad.numel()} | (
        set(got) & {"empty"}
    )
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sync_accumulates_the_sum(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(accumulates, strategy)


def accumulates_with_sync(strategy: str) -> None:
    """Without no_sync every backward adds to .grad, as in PyTorch."""
    sums = []
    for together in (False, True):
        model = make_net(strategy)
        losses = [model(*my_part(batch)) for batch in batches(2)] if together else []
        if together:
            torch.stack(losses).sum().backward()
        else:
            for batch in batches(2):
                model(*my_part(batch)).backward()
        sums.append(gradients(model))
    assert list(sums[0]) == list(sums[1])
    for name, grad in sums[0].items():
        torch.testing.assert_close(grad, sums[1][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_passes_add_up(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(accumulates_with_sync, strategy)


def whole_and_back(strategy: str) -> None:
    model = make_net(strategy)
    assert isinstance(model, graphfsdp.FSDPModule)
    plain = dict(make_net(None).named_parameters())
    sharded = dict(model.named_parameters())
    for unit in units(model):  # the root comes first
        assert isinstance(unit.module, graphfsdp.FSDPModule)
        unit.module.unshard()
    for name, param in model.named_parameters():
        assert not isinstance(param, DTensor)
        assert torch.equal(param, plain[name]), name
    batch = my_part(batches(1)[0])
    by_hand = model(*batch)
    by_hand.backward()
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    for unit in units(model):
        assert isinstance(unit.module, graphfsdp.FSDPModule)
        unit.module.reshard()
    assert all(param is sharded[name] for name, param in model.named_parameters())
    other = make_net(strategy)
    loss = other(*batch)
    loss.backward()
    assert torch.equal(loss, by_hand)
    for (name, left), right in zip(
        gradients(model).items(), gradients(other).values(), strict=True
    ):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unshard_by_hand_and_reshard(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(whole_and_back, strategy)


def kept_whole(reshard_after_forward: bool) -> tuple[list[bool], list[Tensor]]:
    model = make_net("optim_grads_params", reshard_after_forward=reshard_after_forward)
    loss = model(*my_part(batches(1)[0]))
    between = [buffer.full is not None for buffer in buffers(model)]
    loss.backward()
    assert all(buffer.full is None for buffer in buffers(model, trainable=True))
    with torch.no_grad():
        model(*my_part(batches(1)[0]))
    assert all(buffer.full is None for buffer in buffers(model))
    return between, list(gradients(model).values())


def test_reshard_after_forward_decides_what_is_held_until_backward(ranks2: RankPool) -> None:
    kept, dropped = ranks2.run(kept_whole, False)[0], ranks2.run(kept_whole, True)[0]
    assert all(kept[0])
    assert not any(dropped[0])
    for left, right in zip(kept[1], dropped[1], strict=True):
        assert torch.equal(left, right)


def attributes_of_owners() -> None:
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


def test_parameters_keep_what_their_owner_put_on_them(ranks2: RankPool) -> None:
    ranks2.run(attributes_of_owners)


def optimizer_made_before(name: str) -> None:
    results = []
    for first in (True, False):
        torch.manual_seed(0)
        model = Net().to(rank_device())
        if not first:
            shard(model, "optim_grads_params")
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
        lrs: list[Any] = [0.02, 0.01]
        if name == "adamw":
            lrs = [torch.tensor(lr, device=rank_device()) for lr in lrs]
        groups = [
            {"params": decayed, "lr": lrs[0], "weight_decay": 0.5},
            {"params": others, "lr": lrs[1], "weight_decay": 0.0},
        ]
        kind: Any = FusedAdam if name == "fused_adam" else torch.optim.AdamW
        on_gpu = rank_device().type == "cuda"
        options = {} if name == "fused_adam" else {"fused": True, "capturable": on_gpu}
        optim = kind(groups, **options)
        if first:
            shard(model, "optim_grads_params")
        with graphfsdp.capture(model, optim) as step:
            for batch in batches(6):
                step(*my_part(batch))
        assert [len(group["params"]) for group in optim.param_groups] == [len(decayed), len(others)]
        assert [group["weight_decay"] for group in optim.param_groups] == [0.5, 0.0]
        assert all(isinstance(p, DTensor) for g in optim.param_groups for p in g["params"])
        results.append(full_parameters(model))
    for key, whole in results[0].items():
        assert torch.equal(whole, results[1][key]), key


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_an_optimizer_made_before_keeps_its_groups(ranks2: RankPool, name: str) -> None:
    ranks2.run(optimizer_made_before, name)


def full_tensors(strategy: str) -> None:
    """Of parameters, gradients, and what the state_dict and detach() make of parameters."""
    model = make_net(strategy)
    plain = make_net(None)
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), expected[name]), name
    model(*my_part(batches(1)[0])).backward()
    by_hand = gradients(model)
    for unit in units(model):
        for item in unit.group.trainable:
            name = f"{unit.group.name}.{item.name}".lstrip(".")
            holders = torch.tensor(float(item.param.grad is not None))
            dist.all_reduce(holders)
            if float(holders) == dist.get_world_size():  # a collective needs every rank
                grad: Any = item.param.grad
                assert torch.equal(grad.full_tensor(), by_hand[name]), f"gradient of {name}"
    assert len(by_hand) >= 16


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_tensor_is_right_for_uneven_rows(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(full_tensors, strategy)


def full_tensors_of_copies(strategy: str) -> None:
    model = make_net(strategy)
    expected = make_net(None).state_dict()
    for name, param in model.named_parameters():
        assert param.shape == expected[name].shape, f"{name} has shape {tuple(param.shape)}"
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), expected[name]), f"{name} of the state_dict"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_holds_right_full_tensors(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(full_tensors_of_copies, strategy, limit_s=15.0)


class Scaled(nn.Module):
    """Rows that two ranks share unevenly; every rank has some of each parameter, or none."""

    def __init__(self, with_scalar: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), nn.Linear(8, 3)])
        self.scale = nn.Parameter(torch.tensor(1.5)) if with_scalar else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x if self.scale is None else x * self.scale).square().mean()


def clipped_by_torch(strategy: str, with_scalar: bool) -> tuple[float, float]:
    norms = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Scaled(with_scalar).to(rank_device())
        if sharded:
            shard(model, strategy)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(rank_device())
        (100 * model(x)).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        if sharded:
            after = float(graphfsdp.clip_grad_norm_(model, 1.0))
            assert after == pytest.approx(0.1, rel=1e-4)
    return norms[0], norms[1]


@pytest.mark.parametrize("with_scalar", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torch_clips_uneven_shards(ranks2: RankPool, strategy: str, with_scalar: bool) -> None:
    for expected, got in ranks2.run(clipped_by_torch, strategy, with_scalar, limit_s=15.0):
        assert got == pytest.approx(expected, rel=1e-5)


def scheduled() -> None:
    """A scheduler that is made over the optimizer works with captured steps."""
    results = []
    for scope in ("none", "full_iteration"):
        model = make_net("optim_grads_params")
        optim = FusedAdam(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10)
        with graphfsdp.capture(model, optim, scope=scope) as step:
            for batch in batches(10):
                step(*my_part(batch))
                schedule.step()
        assert optim.param_groups[0]["lr"] < 1e-6
        results.append(full_parameters(model))
    for name, whole in results[0].items():
        assert torch.equal(whole, results[1][name]), name


def test_a_scheduler_works(ranks2: RankPool) -> None:
    ranks2.run(scheduled)


class Recurrent(nn.Module):
    """An LSTM as a unit: torch keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(4, 5, batch_first=True)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[0](x)[0]).square().mean()
        return out


def recurrent(strategy: str) -> None:
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
def test_an_lstm_can_be_a_unit(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(recurrent, strategy)
