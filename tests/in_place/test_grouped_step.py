"""Steps by an operator for each group beside torch's own, bit for bit."""

import copy
import functools
import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import graphfsdp
from helpers import OpNames
from iterations import steps_once
from parts_helpers import check
from played_group import played_ranks

SHAPES: Sequence[tuple[int, ...]] = ((), (1,), (7,), (3, 5), (33,), (4, 1, 9))
RATES = st.sampled_from([1e-1, 1e-3, 0.0, 1])


@st.composite
def groups(draw: st.DrawFn, *flags: str) -> list[dict[str, Any]]:
    """Draw settings of one or two groups."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        group: dict[str, Any] = {
            "lr": draw(RATES),
            "weight_decay": draw(st.sampled_from([0, 0.1, 1e-4])),
            "shapes": draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5)),
        }
        found.append(group | {flag: draw(st.booleans()) for flag in flags})
    return found


def check_steps(kind: Any, groups: list[dict[str, Any]], dtype: torch.dtype, seed: int) -> None:
    """Step some times, with gradients that are now and then absent, and another lr each time."""
    shapes = [group["shapes"] for group in groups]

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleList(nn.ParameterList(map(draw, each)) for each in shapes)

    def make_optim(model: Any) -> torch.optim.Optimizer:
        settings = [{k: v for k, v in group.items() if k != "shapes"} for group in groups]
        pairs = zip(model, settings, strict=True)
        optimizer: torch.optim.Optimizer = kind([{**s, "params": [*part]} for part, s in pairs])
        return optimizer

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for step in range(6):
            for place, param in enumerate(model.parameters()):
                skips = (step + place) % 4 == 3
                param.grad = None if skips else draw(param.shape)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (0.9 if step % 2 else 1)
            yield optimizer.step() or 0
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    check(loop, make, make_optim)


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@given(made=groups("amsgrad", "maximize", "foreach"), dtype=DTYPES, seed=st.integers(0, 99))
def test_adam(kind: Any, made: list[dict[str, Any]], dtype: torch.dtype, seed: int) -> None:
    check_steps(kind, made, dtype, seed)


@given(groups("maximize"), DTYPES, st.sampled_from([0, 0.9]), st.integers(0, 99))
def test_sgd(made: list[dict[str, Any]], dtype: torch.dtype, momentum: float, seed: int) -> None:
    for group in made:
        group["momentum"] = momentum
        group["dampening"] = 0.1 if seed % 2 else 0
        group["nesterov"] = bool(momentum) and not seed % 2
    check_steps(torch.optim.SGD, made, dtype, seed)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_group_takes_as_many_operators_for_many_parameters_as_for_few(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played_ranks(1):  # what that makes of other models changes nothing for this one
        graphfsdp.fully_shard(nn.Linear(1, 1))
    called: list[str] = []
    for name in ("_foreach_add_", "_foreach_addcdiv_"):
        operator = getattr(torch, name)

        def call(*args: Any, name: str = name, operator: Any = operator, **kwargs: Any) -> Any:
            called.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(torch, name, call)
    found = []
    for num_params in (2, 20):
        params = [nn.Parameter(torch.randn(3)) for _ in range(num_params)]
        optimizer = kind(params, lr=0.1)
        graphfsdp.capture_in_place(nn.Linear(1, 1), optimizer)
        for param in params:
            param.grad = torch.randn(3)
        optimizer.step()
        called.clear()
        optimizer.step()
        found.append([*called])
    assert found[0] == found[1]
    assert found[0]


def test_parameters_that_come_to_share_memory_are_stepped_one_after_the_other() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index in range(8):
            if index == 4:
                model[1].data = model[0].data
            for param in model:
                param.grad = torch.randn(3)
            yield optimizer.step() or 0

    make_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    check(loop, lambda: nn.ParameterList(map(torch.ones, (3, 3))), make_sgd)


@pytest.mark.parametrize("scheduler_first", [None, False, True])
@pytest.mark.parametrize("captures", ["in place", "as a whole"])
def test_a_step_of_users_around_torchs_is_called(
    captures: str, scheduler_first: bool | None
) -> None:
    """With the names of torch's, which ``wraps`` gives it, and the mark of a scheduler."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if scheduler_first:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)

    @functools.wraps(getattr(optimizer.step, "__func__", optimizer.step))
    def step(self: Any, closure: Any = None) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.clamp_(-1e-3, 1e-3)
        torch.optim.SGD.step(self, closure)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    if scheduler_first is False:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
    before = model.weight.detach().clone()
    if captures == "in place":
        graphfsdp.capture_in_place(nn.Linear(1, 1), optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 3), 9.0)).sum().backward()
            optimizer.step()
    else:
        iteration = steps_once(lambda model, x: model(x).sum())
        with graphfsdp.capture(model, optimizer, iteration=iteration) as captured_step:
            for _ in range(5):
                captured_step(torch.full((2, 3), 9.0))
    assert (model.weight - before).abs().max() < 5e-3


def test_what_watches_steps_sees_torchs_own() -> None:
    param = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    graphfsdp.capture_in_place(nn.Linear(1, 1), optimizer)
    param.grad = torch.randn(3)
    optimizer.step()
    seen = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    optimizer.step()
    handle.remove()
    assert seen == ["hook"]
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
    assert any("Optimizer.step#AdamW.step" in event.key for event in profile.key_averages())
    with OpNames() as operators:  # which might change what they do
        optimizer.step()
    assert not any("foreach" in name for name in operators.names)


def test_schedulers_find_the_step_that_they_look_for() -> None:
    for scheduler_first in (False, True):
        param = nn.Parameter(torch.randn(3))
        optimizer = torch.optim.AdamW([param], lr=0.1)
        make = torch.optim.lr_scheduler.StepLR
        scheduler = make(optimizer, 1) if scheduler_first else None
        parts = graphfsdp.capture_in_place(nn.Linear(1, 1), optimizer)
        scheduler = scheduler or make(optimizer, 1)
        for _ in range(3):
            param.grad = torch.randn(3)
            optimizer.step()
            scheduler.step()  # which warns, and fails the test, if it has not seen the step
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        parts.close()
