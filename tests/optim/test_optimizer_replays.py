"""Every optimizer: ten replays are its own eager steps bit for bit, whole and on two ranks.

Learning rate and weight decay are others in each step, and one step's gradients are not finite. And
ours beside a published implementation's recorded numbers. Every scheduler of torch drives ours, and
step counts part where some calls step only some parameters.
"""

import copy
import inspect
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import graphfsdp
from adam_helpers import Net, loss_in_its_dtype, make_muon
from foreign_adams import CONTRACT, make_stand_in
from graphfsdp.optim import FusedAdam, Muon
from helpers import (
    Batch,
    Case,
    assert_same_states,
    check_against_eager,
    local_part,
    run,
    run_as_eager,
    set_lr,
)
from ranks import on_ranks, rank_device
from sharding_helpers import make_net, replayed_as_eager
from zoo_models import WIDTH, mlp

NUM_STEPS, BAD_STEP = 14, 7  # 3 warm-up, 1 capture, 10 replays


def torch_optimizer(kind: Any, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {}
    if kind is torch.optim.SGD:  # with momentum it is refused in narrow dtypes on a CPU
        settings["momentum"] = 0.9 if params[0].dtype == torch.float32 else 0.0
    if params[0].is_cuda and not settings:
        settings["capturable"] = True
    lr = torch.tensor(0.05, device=params[0].device)
    made: torch.optim.Optimizer = kind(params, lr=lr, weight_decay=0.1, fused=True, **settings)
    return made


def make_foreign(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what clips, skips and counts inside its kernel, and scales the gradients in place."""
    made: Any = make_stand_in(CONTRACT)
    optimizer: torch.optim.Optimizer = made(params, lr=0.05, capturable=True)
    return optimizer


NARROW = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
# Settings of FusedAdam.
MODES: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True, "maximize": True},
    "narrow moments": NARROW,
    "one narrow moment": {"exp_avg_dtype": torch.bfloat16, "adam_w_mode": False},
    "all narrow": {"master_weights": True, **NARROW, "amsgrad": True},
}
# Clipping and skipping are its own, and not those of the capture.
OWN: dict[str, dict[str, Any]] = {"own norm": {"max_grad_norm": 0.1, "skip_nonfinite": True}}


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OURS: Mapping[str, Make] = MappingProxyType(
    {
        "adam": partial(FusedAdam, lr=0.05, master_weights=True),
        "muon": partial(make_muon, lr=0.05),
    }
)
THEIRS: Mapping[str, Make] = MappingProxyType(
    {
        "torch adam": partial(torch_optimizer, torch.optim.Adam),
        "torch adamw": partial(torch_optimizer, torch.optim.AdamW),
        "torch sgd": partial(torch_optimizer, torch.optim.SGD),
        "transformer engine": make_foreign,
    }
)
# Of which the step is behind the graph.
OUTSIDE: Mapping[str, Make] = MappingProxyType(
    {"torch rmsprop": partial(torch.optim.RMSprop, lr=0.05)}
)
ADAMS = {
    name: partial(FusedAdam, lr=0.05, **settings) for name, settings in {**MODES, **OWN}.items()
}
ALL: Mapping[str, Make] = {**OURS, **THEIRS, **OUTSIDE, **ADAMS}


def train(
    name: str, scope: str, device: torch.device, make: Callable[[], nn.Module]
) -> list[dict[str, Tensor]]:
    """Return weights, gradients and states after each call; ranks have other batches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    indices = itertools.count()

    def batch(generator: torch.Generator) -> Batch:
        x = torch.randn(5, 6, generator=generator) * (1 + rank)
        return Batch((x * math.inf if next(indices) == BAD_STEP and rank == 0 else x,))

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        highest = float(optimizer.param_groups[0]["lr"])
        calls = itertools.count()

        def after_call() -> None:
            index = next(calls)
            set_lr(optimizer, highest / (index + 1))
            for group in optimizer.param_groups if name not in THEIRS else ():
                group["weight_decay"] = 0.01 * index

        return after_call

    def look(step: Any, model: nn.Module, index: int) -> None:
        assert step.skipped_steps.item() == (index >= BAD_STEP)

    options: dict[str, Any] = {"max_grad_norm": 0.5, "skip_nonfinite": True}
    options = {"between": look, **({} if name in OWN else options)}
    case = Case(make, batch, loss_in_its_dtype, start)
    return run(case, scope, device, optimizer=ALL[name], **options).snapshots


def assert_alive(found: list[dict[str, Tensor]], weight: str = "parameter first.weight") -> None:
    """All steps but the skipped one move the weights, to finite values."""
    weights = [local_part(state[weight]) for state in found]
    assert all(each.isfinite().all() for each in weights)
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights)]
    assert [index for index, is_other in enumerate(moved, start=1) if not is_other] == [BAD_STEP]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_equals_the_eager_step(
    device: torch.device, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = "graphfsdp.optim.adapters.backends.installed_version"
    monkeypatch.setattr(installed, lambda _: tuple(CONTRACT["version"]))
    scope = "forward_backward" if name in OUTSIDE else "full_iteration"
    expected, found = (
        train(name, each, device, lambda: Net().to(dtype)) for each in ("none", scope)
    )
    assert_same_states(expected, found)
    if dtype == torch.float32:
        assert_alive(found)


def sharded() -> nn.Module:
    model = Net().to(rank_device())
    graphfsdp.fully_shard(model.first)
    return graphfsdp.fully_shard(model)


# torch's fused SGD knows no DTensors, and is refused; see test_refused_settings.py.
@pytest.mark.parametrize("name", ["adam", "amsgrad", "muon", "torch adamw"])
@on_ranks("ranks2")
def test_a_sharded_replay_equals_the_eager_step(name: str) -> None:
    expected, found = (
        train(name, scope, rank_device(), sharded) for scope in ("none", "full_iteration")
    )
    assert_same_states(expected, found)
    assert_alive(found)


@on_ranks("ranks2")
def test_a_sharded_sgd_of_torch_has_an_lr_that_is_live() -> None:
    """Made as the refusal of SGD(fused=True) on shards says."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        params = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)

    replayed_as_eager(lambda: make_net("optim_grads_params"), sgd)


RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "optimizer_steps.json").read_text()
)
# Directions are bfloat16: an entry may be a 64th off at the end of the five iterations, times lr,
# summed over lr's six steps, times the root of the shape's ratio.
BOUND = 0.1 * 2.45 * 1.23 / 32


def test_muon_takes_the_steps_of_the_reference(device: torch.device) -> None:
    """Sharded ones take the steps of whole ones: test_mesh_optimizers.py."""
    params = [
        nn.Parameter(torch.tensor(values, device=device).view(shape))
        for values, shape in zip(RECORDED["start"], RECORDED["shapes"], strict=True)
    ]
    optimizer = Muon(params, lr=RECORDED["lr"], **RECORDED["settings"])
    found = {}
    for step, grads in enumerate(RECORDED["grads"]):
        optimizer.param_groups[0]["lr"] = RECORDED["lr"] / (1 + step)
        optimizer.param_groups[0]["weight_decay"] = RECORDED["decay"] * step
        for param, values in zip(params, grads, strict=True):
            param.grad = torch.tensor(values, device=device).view(param.shape)
        optimizer.step()
        found[str(step)] = [param.detach().clone().cpu() for param in params]
    for step, expected in RECORDED["weights"].items():
        for weight, values in zip(found[step], expected, strict=True):
            wanted = torch.tensor(values).view(weight.shape)
            torch.testing.assert_close(weight, wanted, rtol=0, atol=BOUND)


SCHEDULERS: MappingProxyType[str, Callable[[torch.optim.Optimizer], Any]] = MappingProxyType(
    {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
        "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=20, power=2.0),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
            [3],
        ),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    }
)


ALL_SCHEDULERS = [
    name
    for name in lr_scheduler.__all__
    if inspect.isclass(getattr(lr_scheduler, name)) and name != "LRScheduler"
]


@pytest.mark.parametrize("name", ALL_SCHEDULERS)
def test_a_replay_follows_the_scheduler(device: torch.device, name: str) -> None:
    def make(params: list[nn.Parameter]) -> FusedAdam:
        return FusedAdam(params, lr=0.1, weight_decay=0.5)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        loss = [1.0] if name == "ReduceLROnPlateau" else []  # which does not fall
        return partial(SCHEDULERS[name](optimizer).step, *loss)

    case = Case(mlp, lambda g: Batch((torch.randn(2, WIDTH, generator=g),)), setup=start)
    check_against_eager(case, device, optimizer=make)


BOTH = 2
NUM_CALLS = 30
CPU = torch.device("cpu")


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        hidden = self.trunk(x).tanh()
        used = self.heads if which == BOTH else [self.heads[which]]
        total: Tensor = sum(head(hidden) for head in used)
        return total


def case(kinds: Sequence[int], load_at: int | None = None) -> Case:
    """Return one whose calls use these heads in turn; behind a call, a count is another one."""
    indices = itertools.count()

    def batch(generator: torch.Generator) -> Batch:
        sizes = ((8, 4), (8, 1))
        x, y = (torch.randn(size, generator=generator) for size in sizes)
        return Batch((x, y, kinds[next(indices) % NUM_CALLS % len(kinds)]))

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, which: int) -> Tensor:
        return functional.mse_loss(model(x, which), y)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        calls = itertools.count(1)

        def after_call() -> None:
            num_calls = next(calls)
            optimizer.param_groups[0]["lr"] = 1e-2 / num_calls
            if num_calls == load_at:
                saved = copy.deepcopy(optimizer.state_dict())
                saved["state"][5]["step"] = torch.tensor(3.0)
                optimizer.load_state_dict(saved)

        return after_call

    return Case(TwoHeads, batch, loss_fn, start)


@pytest.mark.parametrize("on_change", ["recapture", "eager"])
@pytest.mark.parametrize(
    "kinds", [(2, 2, 2, 2, 2, 0, 0, 1, 1), (2, 2, 2, 2, 2, 2, 2, 0), (0, 0, 1)], ids=str
)
def test_each_parameter_goes_on_with_its_own_count(kinds: Sequence[int], on_change: str) -> None:
    got = run_as_eager(case(kinds), CPU, num_steps=NUM_CALLS, on_change=on_change)
    # Counts part, and all graphs stay.
    assert on_change == "eager" or got.report.num_calls["replay"] > NUM_CALLS // 3


def test_replays_go_on_with_loaded_counts_that_differ() -> None:
    check_against_eager(case((BOTH,), load_at=5), CPU, num_steps=NUM_CALLS)
