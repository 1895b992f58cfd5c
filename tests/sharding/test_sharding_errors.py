"""Misuses of sharded models, each named on every rank; captures that fail on one rank only."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import CaptureError, ConfigError
from helpers import assert_same_state, set_lr, snapshot
from hidden_count import Unseen
from parallel_models import EP_AXES
from ranks import on_ranks, rank_device
from sharding_helpers import (
    MAX_NORM,
    Net,
    adam,
    assert_equal_tensors,
    batches,
    full_parameters,
    hybrid_mesh,
    hybrid_net,
    learning_rate,
    my_part,
    raises_on_rank,
    shard,
    train,
)

_TWO_GPUS = [pytest.mark.gpu, pytest.mark.multi_gpu]


@on_ranks("ranks2")
def test_an_optimizer_of_parameters_that_were_replaced() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(rank_device())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    graphfsdp.fully_shard(model[0])
    graphfsdp.fully_shard(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    early.zero_grad()
    with raises_on_rank(ConfigError, "SGD holds 4 parameters of 4", "'weight' for one", "after"):
        early.step()
    graphfsdp.capture(model, early, scope="none").close()
    early.step()


@on_ranks("ranks2")
def test_what_is_put_in_the_place_of_shards() -> None:
    """FSDP2 goes on with the sharded parameters, and says nothing."""
    x = torch.ones(3, 4, device=rank_device())
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(rank_device())
    graphfsdp.fully_shard(model[0])
    graphfsdp.fully_shard(model)
    weight = model[0].weight
    with torch.no_grad():
        doubled = weight * 2
        expected = model(x)
        with raises_on_rank(ConfigError, "'0.weight' has been replaced"):
            torch.func.functional_call(model, {"0.weight": torch.zeros(4, 4).to(x)}, x)
        assert torch.equal(model(x), expected)
        model[0].weight = nn.Parameter(doubled)
        with raises_on_rank(ConfigError, "'0.weight' has been replaced", "copy_"):
            model(x)
        model[0].weight = weight
        weight.copy_(doubled)
        assert not torch.equal(model(x), expected)


@on_ranks("ranks2")
def test_a_parent_over_a_busy_child() -> None:
    model = nn.Sequential(nn.Linear(4, 4), graphfsdp.fully_shard(nn.Linear(4, 4)))
    child = model[1]
    assert isinstance(child, graphfsdp.FSDPModule)
    with child.no_sync():
        child(torch.ones(2, 4)).sum().backward()
    with raises_on_rank(ConfigError, "unit '1'", "wait for their reduction"):
        graphfsdp.fully_shard(model)
        model(torch.ones(2, 4))


@pytest.mark.parametrize("what", ["shape", "dtype", "frozen", "missing", "strategy"])
@on_ranks("ranks2")
def test_a_rank_that_differs(what: str) -> None:
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
    with raises_on_rank(ConfigError, "rank"):
        wrapped = graphfsdp.fully_shard(model, strategy=strategy)
        assert isinstance(wrapped, graphfsdp.FSDPModule)
        wrapped.prepare_shards()


@on_ranks("ranks2")
def test_a_module_called_outside_its_unit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graphfsdp.fully_shard(model)
    model(torch.ones(2, 4))
    with raises_on_rank(Exception, "unit", "outside"):
        model[0](torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()


class Reads(Net):
    """Reads a value on the host on rank 1, in the microbatch with that number."""

    def __init__(self, in_microbatch: int) -> None:
        super().__init__()
        self.in_microbatch = in_microbatch
        self.count = 0
        self.read = 0.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        loss = super().forward(tokens, targets)
        if dist.get_rank() == 1 and self.count % 3 == self.in_microbatch:
            self.read = loss.item()
        self.count += 1
        return loss


@pytest.mark.parametrize(
    ("ranks", "strategy", "in_microbatch"),
    [
        ("ranks2", "optim", 1),
        ("ranks2", "optim_grads_params", 0),
        # The capture ends there, so the ranks have recorded unequally many collectives.
        pytest.param("gpu_ranks", "optim_grads_params", 1, marks=_TWO_GPUS),
    ],
)
def test_a_host_read_on_one_rank_rolls_back_all(
    request: pytest.FixtureRequest, ranks: str, strategy: str, in_microbatch: int
) -> None:
    request.getfixturevalue(ranks).run(host_read_on_one_rank, strategy, in_microbatch)


def host_read_on_one_rank(strategy: str, in_microbatch: int) -> None:
    runs = []
    message = ""
    for scope in ("full_iteration", "none"):
        torch.manual_seed(0)
        model = shard(Reads(in_microbatch).to(rank_device()), strategy)
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
    assert_equal_tensors(runs[0][0], runs[1][0])
    assert_equal_tensors(runs[0][1], runs[1][1])
    assert "reads a value of the iteration on the host" in message
    if dist.get_rank() != 1:
        assert re.search(r"rank 1 of 2 failed in iteration \d+: CaptureError", message)
        assert "no rank keeps this iteration" in message
        assert "test_sharding_errors.py" in message


class Raises(Net):
    """A bug of the user's own, in the first forward that is recorded and never again.

    A number on the module would be rolled back with it, and the bug would come again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails = Unseen(False, False, False, True, False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if next(self.fails):
            raise ValueError("a bug of the user's own")
        return super().forward(tokens, targets)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_bug_of_the_user_passes_through(strategy: str) -> None:
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


@on_ranks("ranks4")
def test_another_model_on_one_rank_is_told_to_all() -> None:
    """Rank 3 alone: rank 0 shares no group with it. And other experts than those of the others."""
    mesh, width = hybrid_mesh((2, 2), EP_AXES), 6 if dist.get_rank() == 3 else 4
    experts = nn.Linear(2, 2 + mesh.get_local_rank("ep"))
    for who, wrapped in (
        ("rank 3 ", graphfsdp.fully_shard(nn.Linear(4, width), hybrid_mesh())),
        ("", graphfsdp.fully_shard(experts, mesh, expert_axis="ep")),
    ):
        assert isinstance(wrapped, graphfsdp.FSDPModule)
        with raises_on_rank(ConfigError, f"{who}holds another model than rank"):
            wrapped.prepare_shards()


class LateError(Exception):
    """An error of a user, after all collectives of the iteration."""


@on_ranks("ranks4")
def test_a_failed_capture_is_told_to_ranks_that_share_no_group() -> None:
    """In the optimizer's step hook of rank 3, in a warm-up and in the capture."""
    plain = hybrid_net("optim_grads_params", "optim")
    expected = train(plain, adam(plain), scope="none", num_steps=5)
    model = hybrid_net("optim_grads_params", "optim")
    optimizer = adam(model)
    fails = [False]

    def hook(*args: object) -> None:
        if fails[0] and dist.get_rank() == 3:
            raise LateError("of rank 3")

    optimizer.register_step_post_hook(hook)
    found = []
    losses = []
    with graphfsdp.capture(model, optimizer, warmup_steps=2, max_grad_norm=MAX_NORM) as step:
        for index, batch in enumerate(batches(5)):
            set_lr(optimizer, learning_rate(index))
            if index in (1, 2):
                before = snapshot(model, optimizer)
                fails[0] = True
                with raises_on_rank(Exception) as messages:
                    step(*my_part(batch))
                fails[0] = False
                assert_same_state(before, snapshot(model, optimizer), f"call {index}")
                found += messages
            losses.append(step(*my_part(batch)))
        assert step.report().num_captures == 1
    assert all(map(torch.equal, losses, expected.losses))
    assert len(found) == 2
    for message in found:
        if dist.get_rank() == 3:
            assert message == "of rank 3"
        else:
            assert re.search(r"rank 3 of 4 failed in iteration \d: LateError: of rank 3", message)
            assert "no rank keeps this iteration" in message
