"""What sharding refuses, on every rank and by name; and captures that fail on one rank only."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphfsdp
from graphfsdp import CaptureError, ConfigError, PhaseError
from helpers import assert_same_state, set_lr, snapshot
from ranks import RankPool, rank_device
from sharding_helpers import (
    STRATEGIES,
    Net,
    adam,
    batches,
    full_parameters,
    learning_rate,
    my_part,
    raises_on_rank,
    shard,
)


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"is not initialised.*Remedy"):
        graphfsdp.fully_shard(nn.Linear(2, 2))


def test_what_is_no_module() -> None:
    with pytest.raises(ConfigError, match=r"takes a torch.nn.Module, got list"):
        graphfsdp.fully_shard([nn.Linear(2, 2)])  # type: ignore[arg-type]


def wrong_arguments() -> list[str]:
    found = []
    linear = nn.Linear(2, 2)
    attempts: list[Callable[[], object]] = [
        lambda: graphfsdp.fully_shard(linear, strategy="zero"),
        lambda: graphfsdp.fully_shard(linear, strategy=4),
        lambda: graphfsdp.fully_shard(
            linear,
            init_device_mesh("cpu", (1, 1, dist.get_world_size())),
        ),
        lambda: graphfsdp.fully_shard(graphfsdp.fully_shard(nn.Linear(2, 2))),
    ]
    for attempt in attempts:
        with raises_on_rank(ConfigError) as messages:
            attempt()
        found += messages
    assert type(linear) is nn.Linear
    assert all(type(param) is nn.Parameter for param in linear.parameters())
    return found


def test_wrong_arguments_are_named(ranks2: RankPool) -> None:
    for name, number, mesh, twice in ranks2.run(wrong_arguments):
        assert "'zero'" in name
        assert "'optim_grads_params' (3)" in name
        assert "unknown sharding strategy 4" in number
        assert "which of a mesh of shape (1, 1, 2) with axes that have no names" in mesh
        assert "twice" in twice


class Nested(nn.Module):
    """Calls itself once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        out: Tensor = self(self.inner(x)) if self.depth == 1 else self.inner(x)
        return out


def recursion() -> list[str]:
    model = graphfsdp.fully_shard(nn.Sequential(graphfsdp.fully_shard(Nested())))
    with raises_on_rank(PhaseError) as messages:
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()  # depth is past 1: the unit is as it was
    return messages


def test_a_unit_inside_its_own_forward(ranks2: RankPool) -> None:
    for (message,) in ranks2.run(recursion):
        assert "unit '0' was called inside its own forward" in message


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.blocks[0].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[1](self.blocks[0](x)))
        return out


def tied_across_units() -> list[str]:
    with raises_on_rank(ConfigError) as messages:
        shard(Tied(), "optim_grads_params")
    return messages


def test_a_parameter_tied_across_units(ranks2: RankPool) -> None:
    for (message,) in ranks2.run(tied_across_units):
        assert "'head.weight'" in message
        assert "another unit" in message


def busy_children(pending: bool) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), graphfsdp.fully_shard(nn.Linear(4, 4)))
    child = model[1]
    assert isinstance(child, graphfsdp.FSDPModule)
    if pending:
        with child.no_sync():
            child(torch.ones(2, 4)).sum().backward()
    else:
        child.unshard()
    with raises_on_rank(ConfigError) as messages:
        graphfsdp.fully_shard(model)
        model(torch.ones(2, 4))
    return messages


@pytest.mark.parametrize("pending", [False, True])
def test_a_parent_over_a_busy_child(ranks2: RankPool, pending: bool) -> None:
    for (message,) in ranks2.run(busy_children, pending):
        assert "unit '1'" in message
        assert ("wait for their reduction" if pending else "is unsharded") in message


def other_structure(what: str) -> list[str]:
    odd = dist.get_rank() == 1
    width = 6 if odd and what == "shape" else 4
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU())
    if odd and what == "dtype":
        model.double()
    if odd and what == "frozen":
        model.requires_grad_(False)
    if odd and what == "missing":
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    strategy = "optim" if odd and what == "strategy" else "optim_grads"
    with raises_on_rank(ConfigError) as messages:
        wrapped = graphfsdp.fully_shard(model, strategy=strategy)
        assert isinstance(wrapped, graphfsdp.FSDPModule)
        wrapped.prepare_shards()
    return messages


@pytest.mark.parametrize("what", ["shape", "dtype", "frozen", "missing", "strategy"])
def test_a_rank_that_differs(ranks2: RankPool, what: str) -> None:
    for (message,) in ranks2.run(other_structure, what):
        assert "rank" in message


def outside_its_unit() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graphfsdp.fully_shard(model)
    model(torch.ones(2, 4))
    with raises_on_rank(Exception) as messages:
        model[0](torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    return messages


def test_a_module_called_outside_its_unit(ranks2: RankPool) -> None:
    for (message,) in ranks2.run(outside_its_unit):
        assert "unit" in message
        assert "outside" in message


class Reads(Net):
    """Reads a value on the host on one rank, in the microbatch with that number."""

    def __init__(self, on_rank: int, in_microbatch: int) -> None:
        super().__init__()
        self.on_rank = on_rank
        self.in_microbatch = in_microbatch
        self.count = 0
        self.read = 0.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        loss = super().forward(tokens, targets)
        if dist.get_rank() == self.on_rank and self.count % 3 == self.in_microbatch:
            self.read = loss.item()
        self.count += 1
        return loss


def capture_that_fails(strategy: str, in_microbatch: int) -> str:
    runs = []
    message = ""
    for scope in ("full_iteration", "none"):
        torch.manual_seed(0)
        model = shard(Reads(1, in_microbatch).to(rank_device()), strategy)
        optim = adam(model)
        step = graphfsdp.capture(model, optim, scope=scope, microbatches=3, max_grad_norm=0.5)
        losses = []
        for index, batch in enumerate(batches(8)):
            set_lr(optim, learning_rate(index))
            if index == 3 and scope == "full_iteration":
                before = snapshot(model, optim)
                with raises_on_rank(CaptureError) as messages:
                    step(*my_part(batch))
                (message,) = messages
                assert_same_state(before, snapshot(model, optim), "after the roll-back")
                step.close()
                step = graphfsdp.capture(
                    model, optim, scope="none", microbatches=3, max_grad_norm=0.5
                )
            losses.append(step(*my_part(batch)))
        step.close()
        runs.append((losses, full_parameters(model)))
    for left, right in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(left, right)
    for name, whole in runs[0][1].items():
        assert torch.equal(whole, runs[1][1][name]), name
    return message


@pytest.mark.parametrize("in_microbatch", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_host_read_on_one_rank_rolls_back_all(
    ranks2: RankPool, strategy: str, in_microbatch: int
) -> None:
    others, own = ranks2.run(capture_that_fails, strategy, in_microbatch)
    assert re.search(r"rank 1 of 2 failed in iteration \d+: CaptureError", others)
    assert "no rank keeps this iteration" in others
    assert "reads a value of the iteration on the host" in others
    assert "test_sharding_errors.py" in others
    assert "reads a value of the iteration on the host" in own


class Raises(Net):
    """A bug of the user's own, in the first forward that is recorded and never again.

    A number on the module would be rolled back with it, and the bug would come again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails = iter([False, False, False, True])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if next(self.fails, False):
            raise ValueError("a bug of the user's own")
        return super().forward(tokens, targets)


def user_bug(strategy: str) -> None:
    torch.manual_seed(0)
    model = shard(Raises().to(rank_device()), strategy)
    optim = adam(model)
    with graphfsdp.capture(model, optim) as step:
        for index, batch in enumerate(batches(6)):
            if index == 3:
                with raises_on_rank(ValueError):
                    step(*my_part(batch))
            step(*my_part(batch))
        assert step.phase is graphfsdp.Phase.REPLAY


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_bug_of_the_user_passes_through(ranks2: RankPool, strategy: str) -> None:
    ranks2.run(user_bug, strategy)
