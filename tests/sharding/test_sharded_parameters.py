"""Sharded parameters: what they can do, and what programs hold, replace, write or copy."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphfsdp
from counting_net import mean_square
from everyday_scripts import Adapted, whole_model
from graphfsdp import ConfigError, PhaseError
from graphfsdp.optim import FusedAdam
from graphfsdp.sharding.mesh import RowShard
from parallel_models import TP_AXES, part_of_axis, tensor_parallel, whole_batches
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Net,
    adam,
    assert_equal_tensors,
    batches,
    buffers,
    check_slices,
    full_gradients,
    full_parameters,
    hybrid_mesh,
    make_net,
    my_part,
    on_meta,
    raises_on_rank,
    shard,
    train,
)

WIDTH, ROWS, NUM_STEPS = 8, 4, 14


class Writing(nn.Module):
    """Changes a weight in its own forward pass."""

    def __init__(self, write: Callable[[Tensor], object], *, trains: bool) -> None:
        super().__init__()
        self.write: Callable[[Tensor], object] | None = write
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(trains)
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.frozen(x))
        if self.write is not None:
            with torch.no_grad():
                self.write(self.frozen.weight)
        return out.mean()


def clamp(weight: Tensor) -> object:
    return weight.clamp_(-0.1, 0.1)


def clamp_a_part(weight: Tensor) -> object:
    return weight.detach()[1:3].t().clamp_(-0.1, 0.1)


@on_ranks("ranks2")
def test_writes_into_whole_weights_are_refused() -> None:
    """An embedding that bounds its rows is one of them; what is no copy may be written."""
    said = "forward pass of unit '(root)' writes into its weights in place", "Remedy"
    x = torch.ones(2, WIDTH, device=rank_device())
    for strategy in ("optim", "optim_grads_params"):
        for write in (clamp, clamp_a_part):
            for trains in (False, True):
                model = Writing(write, trains=trains).to(rank_device())
                graphfsdp.fully_shard(model, strategy=strategy)
                with raises_on_rank(PhaseError, *said):
                    model(x)
                model.write = None
                model(x).backward()  # the model is as before
    bounded = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1)).to(rank_device())
    graphfsdp.fully_shard(bounded)
    with torch.no_grad(), raises_on_rank(PhaseError, *said):
        bounded(torch.tensor([1, 2], device=rank_device()))
    unsharded: Any = Writing(clamp, trains=False).to(rank_device())
    graphfsdp.fully_shard(unsharded, strategy="no_shard")
    unsharded(x).backward()
    assert float(unsharded.frozen.weight.full_tensor().abs().max()) < 0.11


@on_ranks("ranks2")
def test_a_backward_through_other_weights_than_the_forwards_is_refused() -> None:
    """Step on one loss before the backward pass of another one."""
    for strategy in ("optim_grads", "optim_grads_params"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).to(rank_device())
        graphfsdp.fully_shard(model, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, WIDTH, device=rank_device())
        first, second = model(x).mean(), model(x).square().mean()
        first.backward()
        optimizer.step()
        if strategy == "optim_grads":
            second.backward()  # it has kept the weights of its forward
            continue
        with raises_on_rank(
            PhaseError,
            "were written between its forward and its backward",
            "optimizer.step() and other writes after the last backward",
        ):
            second.backward()


@on_ranks("ranks2")
def test_writes_between_unshard_and_reshard_are_refused() -> None:
    """And the weights are as they were, and can be written by what the error says."""
    model: Any = nn.Linear(WIDTH, 3).to(rank_device())
    whole = torch.ones(3, WIDTH, device=rank_device())
    graphfsdp.fully_shard(model)
    before = model.weight.full_tensor()
    model.unshard()
    assert model(torch.ones(2, WIDTH, device=rank_device())).shape == (2, 3)
    model.reshard()  # only read
    model.unshard()
    with torch.no_grad():
        model.weight.copy_(whole)
    with raises_on_rank(PhaseError, "written between unshard() and reshard()", "load_state_dict"):
        model.reshard()
    assert torch.equal(model.weight.full_tensor(), before)
    with torch.no_grad():
        model.weight.mul_(2)
    assert torch.equal(model.weight.full_tensor(), 2 * before)
    model.load_state_dict({"weight": whole}, strict=False)
    assert torch.equal(model.weight.full_tensor(), whole)


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


@on_ranks("ranks2")
def test_what_has_no_values_is_named_beside_what_has() -> None:
    x = torch.ones(2, WIDTH, device=rank_device())
    model = on_meta(Adapted)
    graphfsdp.fully_shard(model)
    model.down.to_empty(device=rank_device())
    with raises_on_rank(graphfsdp.ConfigError, "'base.weight' was made on the meta device"):
        model(x)
    model = graphfsdp.fully_shard(Adapted().to(rank_device()))
    model.down.double()
    with raises_on_rank(graphfsdp.ConfigError, "'down.weight' does not lie in the buffers"):
        model(x)


@pytest.mark.parametrize(
    "make",
    [
        partial(tensor_parallel, sequence=True),
        partial(make_net, "optim_grads_params", outer_strategy="no_shard"),
        partial(make_net, "optim_grads_params", outer_strategy="optim"),
    ],
)
@on_ranks("ranks4")
def test_norms_and_counts_are_those_of_whole_parameters_and_gradients(
    make: partial[Any],
) -> None:
    """On two axes; on one, scripts of FSDP2 print them."""
    model = make()
    (batch,) = whole_batches()[:1]
    if make.func is tensor_parallel:
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


def assert_apart(model: Any, twin: Any) -> None:
    """No memory of one is the other's."""
    mine = {b.main.untyped_storage().data_ptr() for b in buffers(model) if b.main.numel()}
    theirs = {b.main.untyped_storage().data_ptr() for b in buffers(twin) if b.main.numel()}
    assert theirs
    assert mine.isdisjoint(theirs)
    assert {id(p) for p in model.parameters()}.isdisjoint(map(id, twin.parameters()))
    check_slices(twin)


@pytest.mark.parametrize(
    ("ranks", "strategy", "outer"),
    [
        *(("ranks2", strategy, None) for strategy in STRATEGIES),
        *(("ranks4", "optim_grads_params", outer) for outer in ("no_shard", "optim")),
    ],
)
@on_ranks()
def test_a_copy_trains_as_the_original_would(strategy: str, outer: str | None) -> None:
    """Copied before the first forward pass, after it, and with gradients; both then go on alone."""
    for steps_before in (0, 2):
        model: Any = make_net(strategy, outer_strategy=outer)
        if outer is None and not steps_before:
            model = make_net(None)
            for together in ([*model.blocks], model):  # a unit of two modules
                graphfsdp.fully_shard(together, strategy=strategy)
        if steps_before:
            train(model, adam(model), num_steps=steps_before, scope="none")
            model(*my_part(batches(1)[0])).backward()
        twin = copy.deepcopy(model)
        assert type(twin) is type(model)
        assert_apart(model, twin)
        pairs: Any = zip(model.parameters(), twin.parameters(), strict=True)
        for mine, other in pairs:
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                assert torch.equal(mine.grad.to_local(), other.grad.to_local())
        before = full_parameters(twin)
        assert_equal_tensors(full_parameters(model), before)
        runs = [train(model, adam(model))]
        assert_equal_tensors(full_parameters(twin), before)  # it was left alone
        assert_apart(model, twin)
        runs.append(train(twin, adam(twin)))
        assert_equal_tensors(*(run.tensors() for run in runs))
        assert_apart(model, twin)
    block = copy.deepcopy(model.blocks[0])  # which is a root of its own
    x = torch.ones(2, 8, device=rank_device())
    assert torch.equal(block(x), model.blocks[0](x))
    assert len(buffers(block)) == len(buffers(model.blocks[0]))


@on_ranks("ranks2")
def test_a_method_that_is_a_forward_pass_is_that_of_the_copy() -> None:
    """Target networks in a graph are trained in test_trains_like_one_rank.py."""
    model: Any = make_net("optim_grads_params")
    graphfsdp.register_fsdp_forward_method(model, "logits")
    target = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    tokens, _ = my_part(batches(1)[0])
    plain: Any = make_net(None)
    assert torch.equal(target.logits(tokens), plain.logits(tokens))
    assert not torch.equal(model.logits(tokens), plain.logits(tokens))


@on_ranks("ranks2")
def test_copies_without_values_and_what_is_refused() -> None:
    model = shard(on_meta(Net), "optim_grads_params")
    twin: Any = copy.deepcopy(model)
    for each in (model, twin):
        torch.manual_seed(0)
        with raises_on_rank(graphfsdp.ConfigError, "has no values yet"):
            each(*my_part(batches(1)[0]))
    nn.Sequential(twin).to_empty(device=rank_device())
    assert all(param.is_meta for param in model.parameters())
    assert all(bool(param.to_local().isnan().all()) for param in twin.parameters())
    wide: Any = graphfsdp.fully_shard(nn.Linear(4, 4).to(rank_device()))
    wide.unshard()
    with raises_on_rank(graphfsdp.NotCopyableError, "unit '(root)' cannot be copied", "unsharded"):
        copy.deepcopy(wide)
    wide.reshard()
    assert isinstance(copy.deepcopy(wide), graphfsdp.FSDPModule)
    policy = graphfsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, gather_format="float8", main_grads_dtype=torch.float32
    )
    packed = graphfsdp.fully_shard(nn.Linear(4, 4).to(rank_device()), mp_policy=policy)
    with raises_on_rank(graphfsdp.NotCopyableError, "quantised"):
        copy.deepcopy(packed)


@on_ranks("ranks2")
def test_pickles_are_refused() -> None:
    """Before the first forward pass, as after it; scripts of FSDP2 save what the error says."""
    model: Any = make_net("optim_grads_params")
    for pickled in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        for value in (model, [model], nn.Sequential(model)):
            with raises_on_rank(graphfsdp.NotCopyableError, "cannot be pickled", "Remedy"):
                pickled(value)
