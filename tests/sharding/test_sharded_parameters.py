"""What the parameters of a sharded module can do, and which of their gradients are refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphfsdp
from counting_net import mean_square
from everyday_scripts import whole_model
from graphfsdp import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.sharding.placement import RowShard
from parallel_models import TP_AXES, part_of_axis, tensor_parallel, whole_batches
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Net,
    check_slices,
    full_gradients,
    full_parameters,
    hybrid_mesh,
    hybrid_net,
    make_net,
    my_part,
    on_meta,
    raises_on_rank,
    shard,
)


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


def of_tensors() -> Any:
    return tensor_parallel(sequence=True)


def repeated() -> Any:
    return hybrid_net("optim_grads_params", "no_shard")


def cut_twice() -> Any:
    return hybrid_net("optim_grads_params", "optim")


@pytest.mark.parametrize("make", [of_tensors, repeated, cut_twice])
@on_ranks("ranks4")
def test_norms_and_counts_are_those_of_whole_parameters_and_gradients(
    make: Callable[[], Any],
) -> None:
    """On two axes; on one, scripts of FSDP2 print them."""
    model = make()
    (batch,) = whole_batches()[:1]
    if make is of_tensors:
        model(*part_of_axis(batch, hybrid_mesh((2, 2), TP_AXES), "dp")).backward()
    else:
        model(*my_part(batch)).backward()
    check_slices(model)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    params = {name: param.detach() for name, param in model.named_parameters()}
    wholes, whole_grads = full_parameters(model), full_gradients(model)
    assert len(grads) < len(wholes)  # a parameter that nothing uses, or is frozen
    for every, of_all in ((params, wholes), (grads, whole_grads)):
        for name, whole in of_all.items():
            rows: Any = every[name]
            found, expected = rows.double().norm().full_tensor(), whole.double().norm()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert int((rows > 0).sum().full_tensor()) == int((whole > 0).sum())
    total = math.sqrt(sum(float(grad.double().norm()) ** 2 for grad in whole_grads.values()))
    for limit, expected in ((total / 2, total), (1e9, total / 2)):
        assert float(graphfsdp.clip_grad_norm_(model, limit)) == pytest.approx(expected, rel=1e-5)


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


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """Add a penalty on all weights, as people write it without sharding."""
    loss = mean_square(model, x)
    for param in model.parameters():
        whole: Any = param.square().sum()
        loss = loss + 0.1 * whole.full_tensor()
    return loss


@on_ranks("ranks2")
def test_a_penalty_on_sharded_parameters_is_refused() -> None:
    said = "has reached the sharded parameter", "weight_decay for an L2 penalty"
    x = torch.ones(2, 8, device=rank_device())
    empty = graphfsdp.fully_shard(on_meta(whole_model))
    graphfsdp.materialize(empty, rank_device())
    with raises_on_rank(ConfigError, *said):
        penalized(empty, x).backward()
    for strategy in STRATEGIES:
        model = whole_model().to(rank_device())
        for unit in (model[0], model):
            graphfsdp.fully_shard(unit, strategy=strategy)
        with raises_on_rank(ConfigError, *said):
            penalized(model, x).backward()
        optimizer = FusedAdam(model.parameters())
        with (
            graphfsdp.capture(model, optimizer, loss_fn=penalized) as step,
            raises_on_rank(ConfigError, *said),
        ):
            step(x)
        with graphfsdp.capture(model, optimizer, loss_fn=mean_square) as step:
            for _ in range(5):  # the model can be trained nevertheless
                step(x)
