"""FusedSGD and FusedLion: their references, kernels, states, and replays."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from adam_helpers import (
    assert_equal,
    copies_of,
    make_groups,
    make_params,
    make_twins,
    set_grads,
    step_together,
    take_steps,
)
from adam_kernel_cases import (
    FP32,
    MIXED,
    assert_kernel_is_tensor_code,
    dtype_names,
    interpreted,
    interpreter,  # noqa: F401  (a fixture)
)
from graphfsdp.errors import ConfigError, GuardError
from graphfsdp.optim import FusedLion, FusedSGD
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import Dtypes, join_remainder

SGD_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "maximize": True},
}


@pytest.mark.parametrize("name", SGD_SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_stays_with_that_of_torch(device: torch.device, name: str, dtype: torch.dtype) -> None:
    params, twins = make_twins(device=device, dtype=dtype)
    ours = FusedSGD(params, lr=0.01, **SGD_SETTINGS[name])
    theirs = torch.optim.SGD(twins, lr=0.01, **SGD_SETTINGS[name])
    step_together(ours, theirs, 0.01, 100)
    for param, twin in zip(params, twins, strict=True):
        # A few roundings per step of numbers below 10.
        close = 100 * 4 * 10 * torch.finfo(dtype).eps
        torch.testing.assert_close(param, twin, rtol=0, atol=close)


LION = Flags(adam_w_mode=True, bias_correction=False, rule="lion")
SGD = Flags(adam_w_mode=False, bias_correction=False, rule="sgd")
NESTEROV = SGD._replace(nesterov=True, maximize=True)
CASES = [
    FP32._replace(exp_avg_sq=None),
    MIXED._replace(exp_avg_sq=None),
    MIXED._replace(main_param=torch.int16, exp_avg_sq=None),
]


@interpreted
@pytest.mark.parametrize(
    ("dtypes", "flags"),
    [
        *((dtypes, flags) for dtypes in CASES for flags in (LION, SGD, NESTEROV)),
        (FP32._replace(exp_avg=None, exp_avg_sq=None), SGD),
    ],
    ids=lambda value: value.rule if isinstance(value, Flags) else dtype_names(value),
)
def test_interpreted_kernel_equals_the_tensor_code_bit_for_bit(
    dtypes: Dtypes, flags: Flags
) -> None:
    assert_kernel_is_tensor_code([(8, 256), (3, 300), (1, 5)], dtypes, flags)


def make_sgd(params: Any, **settings: Any) -> DeviceOptimizer:
    return FusedSGD(params, lr=0.05, momentum=0.9, **settings)


def make_lion(params: Any, **settings: Any) -> DeviceOptimizer:
    return FusedLion(params, lr=0.01, weight_decay=0.1, **settings)


OPTIMIZERS: dict[str, Callable[..., DeviceOptimizer]] = {
    "sgd": make_sgd,
    "nesterov": lambda params, **settings: make_sgd(params, nesterov=True, **settings),
    "lion": make_lion,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_main_weights_step_in_float32(device: torch.device, name: str) -> None:
    params = make_params(dtype=torch.bfloat16, device=device)
    twins = [nn.Parameter(param.detach().float()) for param in params]
    ours = OPTIMIZERS[name](params, master_weights=True, store_param_remainders=True)
    theirs = OPTIMIZERS[name](twins)
    for _ in range(10):
        set_grads(params)
        for param, twin in zip(params, twins, strict=True):
            assert param.grad is not None
            twin.grad = param.grad.float()
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        main = join_remainder(param.detach(), ours.state[param]["master_param"])
        assert torch.equal(main, twin)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_of_the_sgd_of_torch_loads(momentum: float) -> None:
    params = make_params()
    settings: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "dampening": 0.2 * momentum}
    theirs = torch.optim.SGD(params, **settings)
    take_steps(2, theirs)
    twins = copies_of(params)
    ours = FusedSGD(twins, **{**settings, "lr": 0.3})
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.1
    take_steps(3, theirs, ours)
    torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-6)
    other = torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    if momentum:
        with pytest.raises(ConfigError, match=r"nesterov=True.*construct FusedSGD with nesterov"):
            ours.load_state_dict(other.state_dict())


def test_a_state_of_a_lion_that_counts_no_steps_loads() -> None:
    params = make_params()
    source = make_lion(params)
    take_steps(1, source)
    state = copy.deepcopy(source.state_dict())
    for entries in state["state"].values():
        del entries["step"]
    del state["control"]
    twins = copies_of(params)
    target = make_lion(twins)
    target.load_state_dict(state)
    take_steps(1, source, target)
    assert_equal(params, twins)


def test_sgd_without_momentum_keeps_no_buffer_and_refuses_to_get_some() -> None:
    params = make_params()
    optimizer = FusedSGD(params)
    take_steps(1, optimizer)
    assert set(optimizer.state[params[0]]) == {"step"}
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"momentum of parameter group 0 became 0.9"):
        optimizer.step()


def test_groups_may_have_momentum_or_none() -> None:
    params, twins = make_twins()

    def groups(members: list[nn.Parameter]) -> list[dict[str, Any]]:
        return make_groups({"params": members[:2], "momentum": 0.9}, {"params": members[2:]})

    ours, theirs = FusedSGD(groups(params), lr=0.1), torch.optim.SGD(groups(twins), lr=0.1)
    take_steps(3, ours, theirs)
    torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-6)


def test_a_replaced_tensor_lr_is_named_with_its_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = FusedLion(model.parameters(), lr=torch.tensor(0.1))
    with graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m(x).sum()) as step:
        for _ in range(4):
            step(torch.ones(2, 4))
        optimizer.param_groups[0]["lr"] = 0.1
        with pytest.raises(GuardError, match="'lr' of group 0 of FusedLion was a tensor"):
            step(torch.ones(2, 4))


def test_a_checkpoint_of_another_rule_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    source = FusedSGD(model.parameters(), momentum=0.9, nesterov=True)
    set_grads(list(model.parameters()))
    source.step()
    graphfsdp.save(tmp_path, model, source, rng=False)
    before = model.weight.detach().clone()
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="saved with nesterov=True"):
        graphfsdp.load(tmp_path, model, FusedSGD(model.parameters(), momentum=0.9))
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="from FusedSGD, here a FusedLion"):
        graphfsdp.load(tmp_path, model, FusedLion(model.parameters()))
    assert torch.equal(model.weight, before)
