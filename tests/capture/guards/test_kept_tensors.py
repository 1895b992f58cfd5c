"""Tensors that Python keeps of one iteration for the next: a replay would read one for ever."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import HazardKind
from graphfsdp.errors import CaptureError
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, snapshot
from ranks import on_ranks, rank_device

Loss = Callable[[nn.Module, Tensor], Tensor]


def reads_the_last(kept: list[Tensor] | collections.deque[Tensor]) -> Loss:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        loss: Tensor = (out - kept[-1]).square().mean()  # reads what was kept
        kept.append(out.detach())
        return loss

    return loss_fn


def of_a_list(device: torch.device) -> Loss:
    return reads_the_last([torch.zeros(2, 4, device=device)])


def of_a_long_queue(device: torch.device) -> Loss:
    return reads_the_last(collections.deque([torch.zeros(2, 4, device=device)] * 30, maxlen=30))


def weighted(weights: dict[str, Tensor]) -> Loss:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x).square() * weights["classes"]).mean()
        return loss

    return loss_fn


def start(
    make: Callable[[torch.device], Callable[..., Any]], device: torch.device, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    return model, optimizer, graphfsdp.capture(model, optimizer, loss_fn=make(device), **options)


@pytest.mark.parametrize("warmup_steps", [1, 3])
@pytest.mark.parametrize("make", [of_a_list, of_a_long_queue])
def test_a_tensor_that_is_kept_for_the_next_iteration_is_refused(
    device: torch.device, make: Callable[[torch.device], Loss], warmup_steps: int
) -> None:
    model, optimizer, step = start(make, device, warmup_steps=warmup_steps)
    for _ in range(warmup_steps + 1):  # once somebody may have changed something between two calls
        step(torch.randn(2, 4, device=device))
    x = torch.randn(2, 4, device=device)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"keeps of the iteration before.*Remedy") as caught:
        step(x)
    assert caught.value.kind is HazardKind.STATE
    assert caught.value.source is not None
    assert "reads what was kept" in caught.value.source.text
    assert_same_state(before, snapshot(model, optimizer))
    step.close()
    report = graphfsdp.check(model, optimizer, x, loss_fn=make(device))
    (hazard,) = [hazard for hazard in report.hazards if hazard.kind is HazardKind.STATE]
    assert "keeps of the iteration before" in hazard.why
    assert hazard.source == caught.value.source


def test_a_tensor_that_is_replaced_before_the_capture_costs_one_more_warm_up(
    device: torch.device,
) -> None:
    weights = {"classes": torch.ones(4, device=device)}

    _, _, step = start(lambda _: weighted(weights), device, warmup_steps=2)
    x = torch.randn(2, 4, device=device)
    for index in range(6):
        if index == 2:  # before what would be the capture
            weights["classes"] = torch.full((4,), 2.0, device=device)
        step(x)
    assert step.report().num_calls == {"warmup": 3, "capture": 1, "replay": 2}
    step.close()


def by_a_hook(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    seen: dict[str, Tensor] = {}
    model.register_forward_hook(lambda module, args, out: seen.__setitem__("out", out))
    return (lambda model, x: model(x).square().mean()), lambda: seen["out"]


def in_a_list(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.detach()))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.clear()
        loss: Tensor = model(x).square().mean()
        return loss

    return loss_fn, lambda: seen[0]


def as_an_attribute(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    class Criterion:
        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            self.outs: list[Tensor] = [model(x)]
            return self.outs[0].square().mean()

    criterion: Any = Criterion()
    return criterion, lambda: criterion.outs[0]


def as_a_variable(model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    last: Any = None

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal last
        last = model(x)
        loss: Tensor = last.square().mean()
        return loss

    return loss_fn, lambda: last


@pytest.mark.parametrize("make", [by_a_hook, in_a_list, as_an_attribute, as_a_variable])
def test_what_is_kept_to_be_looked_at_is_that_of_the_last_call(
    device: torch.device, make: Callable[[nn.Module], tuple[Any, Callable[[], Any]]]
) -> None:
    runs = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        loss_fn, look = make(model)
        options: Any = {"loss_fn": loss_fn, "scope": scope, "on_change": "recapture", "audit": 4}
        seen = []
        with graphfsdp.capture(model, optimizer, **options) as step:
            for index in range(24):
                step(torch.randn(2 + index // 2 % 2, 4, device=device))
                seen.append(look().detach().clone())
            calls = step.report().num_calls
        runs.append(torch.cat(seen))
    assert calls["replay"] >= 12
    assert calls["audit"] >= 3  # of both kinds
    assert torch.equal(*runs)


@pytest.mark.parametrize("always", [False, True])
@on_ranks("ranks2")
def test_what_one_rank_replaces_costs_all_a_warm_up_and_is_refused_on_all_in_each_call(
    always: bool,
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4).to(rank_device())
    graphfsdp.fully_shard(model)
    weights = {"classes": torch.ones(4, device=rank_device())}
    optimizer = FusedAdam(model.parameters())
    step = graphfsdp.capture(model, optimizer, loss_fn=weighted(weights), warmup_steps=2)
    kept = [weights["classes"]]
    errors = []
    for index in range(6):
        if dist.get_rank() == 1 and (index == 2 or always):
            weights["classes"] = torch.ones(4, device=rank_device())
            kept.append(weights["classes"])
        try:
            step(torch.ones(2, 4, device=rank_device()))
        except CaptureError as error:
            errors.append(str(error))
    if always:
        words = ("rank 1 of 2 failed", "keeps of the iteration before")[dist.get_rank()]
        assert [words in text for text in errors] == [True] * 3, errors
    else:
        assert errors == []
        assert step.report().num_calls == {"warmup": 3, "capture": 1, "replay": 2}
    step.close()
