"""Prefetch and reductions that run while others compute: same bits in every use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from overlap_helpers import inputs, make_stack
from ranks import on_ranks
from sharding_helpers import (
    assert_equal_tensors,
    buffers,
    make_net,
)

# ---------------------------------------------------------------- odd uses


@on_ranks("ranks2")
def test_weights_written_after_their_prefetch_are_seen() -> None:
    """Weights that a hook writes after they were gathered ahead are gathered again."""
    losses = []
    for overlap in (False, True):
        model = make_stack(overlap=overlap)

        def clip(module: nn.Module, args: Any, model: Any = model) -> None:
            with torch.no_grad():
                for param in model.blocks[1].parameters():
                    param.to_local().clamp_(-0.05, 0.05)

        model.blocks[0].norm.register_forward_pre_hook(clip)
        values = []
        for x in inputs(4):
            loss = model(x)
            loss.backward()
            values.append(loss.detach())
            with torch.no_grad():
                for param in model.blocks[1].parameters():
                    param.to_local().add_(0.3)
            for param in model.parameters():
                param.grad = None
        losses.append(values)
    assert_equal_tensors(*losses)


class BoomError(RuntimeError):
    """What a model raises."""


@contextmanager
def failing(module: nn.Module, *, in_backward: bool) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise BoomError

    if in_backward:
        handle = module.register_full_backward_hook(fail)
    else:
        handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@on_ranks("ranks2")
def test_an_exception_with_collectives_under_way() -> None:
    """Every rank fails in the middle, with gathers and reductions under way; then all goes on."""
    model, plain = make_stack(), make_stack(overlap=False)
    for index, x in enumerate(inputs(8)):
        if index in (2, 4):
            with failing(model.blocks[2].norm, in_backward=index == 4), pytest.raises(BoomError):
                model(x.requires_grad_()).backward()
            model.abandon_iteration()
            assert not any(buffer.is_prefetched for buffer in buffers(model))
            for param in model.parameters():
                param.grad = None
        both = []
        for each in (model, plain):
            each(x).backward()
            both.append([param.grad.to_local().clone() for param in each.parameters()])
            for param in each.parameters():
                param.grad = None
        assert_equal_tensors(*both)


@on_ranks("ranks2")
def test_an_error_that_the_loop_catches() -> None:
    """A plain loop that catches an error knows nothing of abandon_iteration."""
    model, plain = make_stack(), make_stack(overlap=False)
    for index, x in enumerate(inputs(6)):
        for each in (model, plain):
            if index == 3:
                with failing(each.blocks[1].norm, in_backward=False), pytest.raises(BoomError):
                    each(x)
            each(x).backward()
        grads = [[p.grad.to_local() for p in each.parameters()] for each in (model, plain)]
        assert_equal_tensors(*grads)


@on_ranks("ranks2")
def test_accumulation_and_repeated_backward() -> None:
    """no_sync, two backward passes of one forward, a backward inside a forward."""
    results = []
    for overlap in (False, True):
        model = make_stack(overlap=overlap)
        x, y, z = inputs(3)
        for _ in range(3):
            for param in model.parameters():
                param.grad = None
            with model.no_sync():
                model(x).backward()
            model(y).backward()
            loss = model(z)
            loss.backward(retain_graph=True)
            loss.backward()
            probe = z.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(probe), probe)
        results.append([slope, *(p.grad.to_local().clone() for p in model.parameters())])
    assert_equal_tensors(*results)


# ---------------------------------------------------------------- communicators, options, ops


@on_ranks("ranks2")
def test_all_gathers_have_a_communicator_made_once() -> None:
    groups = []
    for _ in range(2):  # the second model uses those of the first
        model: Any = make_net("optim_grads_params")
        model.prepare_shards()
        for buffer in buffers(model):
            assert (buffer.gather_group is not buffer.mesh.inner) == buffer.sharded
            assert buffer.gather_group.size() == buffer.mesh.inner.size()
            groups += [buffer.gather_group] * buffer.sharded
    shared: Any = make_net("optim_grads_params", overlap=False)
    shared.prepare_shards()
    assert all(buffer.gather_group is buffer.mesh.inner for buffer in buffers(shared))
    assert len({id(group) for group in groups}) == 1
