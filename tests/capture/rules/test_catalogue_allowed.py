"""Odd but well-behaved training steps: captured, and ten replays equal to eager bit for bit."""

import pytest
import torch
from torch.utils import _pytree as pytree

import graphfsdp
from catalogue import PROGRAMS, Odd
from catalogue_models import MODELS
from helpers import (
    NUM_STEPS,
    Trace,
    assert_alive,
    assert_same_run,
    make_optimizer,
    quick_garbage_collection,
    set_lr,
    snapshot,
)

CATALOGUE = PROGRAMS | MODELS


def train(odd: Odd, scope: str) -> Trace:
    """Train with batches, learning rates and generators that change between the calls."""
    quick_garbage_collection()
    torch.manual_seed(3)
    model = odd.make()
    model.generator = torch.Generator().manual_seed(4)  # type: ignore[assignment]
    params = [param for param in model.parameters() if param.requires_grad]
    optim = make_optimizer(odd.optimizer, params, torch.device("cpu"))
    after_call = None if odd.setup is None else odd.setup(model, optim)
    batches = torch.Generator().manual_seed(5)
    trace = Trace()
    with graphfsdp.capture(model, optim, loss_fn=odd.loss_fn, scope=scope) as step:
        for index in range(NUM_STEPS):
            if odd.setup is None:
                set_lr(optim, 0.02 / (1 + index))
            torch.rand(())  # somebody else draws in between
            batch = odd.batch(batches)
            leaves = pytree.tree_leaves(step(*batch.args, **batch.kwargs))
            trace.outputs.append([leaf for leaf in leaves if leaf is not None])
            if after_call is not None:
                after_call()
            trace.snapshots.append(snapshot(model, optim))
        trace.report = step.report()
    return trace


def test_the_catalogue_is_long() -> None:
    assert len(CATALOGUE) >= 40 + 10


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp uses it
def test_an_odd_program_replays_as_eager_runs(name: str) -> None:
    expected, got = train(CATALOGUE[name], "none"), train(CATALOGUE[name], "full_iteration")
    expected.outputs = [
        [leaf for leaf in leaves if leaf is not None] for leaves in expected.outputs
    ]
    got.outputs = [[leaf for leaf in leaves if leaf is not None] for leaves in got.outputs]
    assert_alive(expected)
    assert_same_run(expected, got)
    assert got.report is not None
    assert got.report.num_captures == 1
    assert got.report.num_calls["replay"] == NUM_STEPS - 4
