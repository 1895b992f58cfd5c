"""Deep copies of sharded modules: target networks, averages of weights, in a graph too."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Net,
    adam,
    assert_equal_tensors,
    batches,
    buffers,
    check_slices,
    full_parameters,
    hybrid_net,
    make_net,
    my_part,
    on_meta,
    raises_on_rank,
    shard,
    train,
)


def assert_apart(model: Any, twin: Any) -> None:
    """No memory of one is the other's."""
    mine = {b.main.untyped_storage().data_ptr() for b in buffers(model) if b.main.numel()}
    theirs = {b.main.untyped_storage().data_ptr() for b in buffers(twin) if b.main.numel()}
    assert theirs
    assert mine.isdisjoint(theirs)
    assert {id(p) for p in model.parameters()}.isdisjoint(map(id, twin.parameters()))
    check_slices(twin)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_a_copy_trains_as_the_original_would(strategy: str) -> None:
    """Copied before the first forward pass, after it, and with gradients; both then go on alone."""
    for steps_before in (0, 2):
        model = make_net(strategy)
        if steps_before:
            train(model, adam(model), num_steps=steps_before, scope="none")
            model(*my_part(batches(1)[0])).backward()
        twin = copy.deepcopy(model)
        assert isinstance(twin, graphfsdp.FSDPModule)
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


@on_ranks("ranks2")
def test_a_method_that_is_a_forward_pass_is_that_of_the_copy() -> None:
    """Target networks in a graph are trained in test_sharded_iterations.py."""
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


@on_ranks("ranks4")
def test_copies_on_two_axes_and_of_parts() -> None:
    for outer in ("no_shard", "optim"):
        model = hybrid_net("optim_grads_params", outer)
        twin = copy.deepcopy(model)
        runs = [train(each, adam(each)) for each in (model, twin)]
        assert_equal_tensors(*(run.tensors() for run in runs))
    block = copy.deepcopy(model.blocks[0])  # which is a root of its own
    x = torch.ones(2, 8, device=rank_device())
    assert torch.equal(block(x), model.blocks[0](x))
    assert len(buffers(block)) == len(buffers(model.blocks[0]))


@on_ranks("ranks2")
def test_copies_without_values_and_what_is_refused() -> None:
    model = shard(on_meta(Net), "optim_grads_params")
    twin = copy.deepcopy(model)
    for each in (model, twin):
        torch.manual_seed(0)
        with raises_on_rank(graphfsdp.ConfigError, "has no values yet"):
            each(*my_part(batches(1)[0]))
    twin.to_empty(device=rank_device())
    assert all(param.is_meta for param in model.parameters())
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
