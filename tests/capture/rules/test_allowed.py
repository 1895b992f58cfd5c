"""What looks forbidden or odd and is not: captured, and replays equal eager bit for bit."""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import graphfsdp
from catalogue import PROGRAMS, Odd
from catalogue_models import MODELS
from helpers import (
    NUM_STEPS,
    Trace,
    assert_alive,
    assert_same_run,
    line_of,
    make_optimizer,
    quick_garbage_collection,
    set_lr,
    snapshot,
)
from probe import Inner, check_captured, check_refused
from programs import ALLOWED, ALLOWED_ON_A_CPU, CONSTANT_READS

CPU = torch.device("cpu")
ONLY_ON_A_CPU = ALLOWED_ON_A_CPU | CONSTANT_READS


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_captured(name: str, device: torch.device) -> None:
    check_captured(ALLOWED[name], device)


@pytest.mark.parametrize("name", ONLY_ON_A_CPU)
def test_what_a_cpu_graph_can_hold_is_captured(name: str) -> None:
    check_captured(ONLY_ON_A_CPU[name], CPU)


def test_a_constant_stops_being_one_when_it_is_written() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total += h.detach().mean(dim=0)
        return h * total[0].item()  # refused

    error = check_refused(program, CPU)
    assert error.source is not None
    assert error.source.line == line_of(program, "# refused")


def test_a_view_of_a_constant_that_is_written_taints_all_of_it() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total[2:].copy_(h.detach()[0, :2])
        return h * float(total[3])

    check_refused(program, CPU)


def test_a_literal_starts_anew_in_every_replay() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.tensor([0.0, 1.0, 2.0, 3.0])
        total += h.detach().mean(dim=0)
        total[0] = 7.0
        return h * total

    check_captured(program, CPU)


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


def test_no_program_is_lost() -> None:
    assert len(CATALOGUE) >= 53
    assert len(ALLOWED | ONLY_ON_A_CPU) >= 29


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp uses it
def test_an_odd_program_replays_as_eager_runs(name: str) -> None:
    expected, got = train(CATALOGUE[name], "none"), train(CATALOGUE[name], "full_iteration")
    assert_alive(expected)
    assert_same_run(expected, got)
    assert got.report is not None
    assert got.report.num_captures == 1
    assert got.report.num_calls["replay"] == NUM_STEPS - 4
