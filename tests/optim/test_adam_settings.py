"""Settings of FusedAdam beyond plain Adam, and what it refuses, by name."""

from typing import Any

import pytest
import torch
from torch import nn

from adam_helpers import assert_equal, make_params, make_twins, take_steps
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam, Muon


def adam(**settings: Any) -> Any:
    return FusedAdam, settings


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (adam(exp_avg_dtype=torch.float8_e4m3fn), "exp_avg_dtype .*bfloat16, got .*e4m3fn"),
        (adam(exp_avg_sq_dtype=torch.float16), "exp_avg_sq_dtype .*bfloat16, got .*float16"),
        (adam(exp_avg_sq_dtype=torch.int8), "exp_avg_sq_dtype .* got torch.int8"),
        (adam(master_weight_dtype=torch.float16), "master_weight_dtype must"),
        (adam(max_grad_norm=0.0), "max_grad_norm must be a positive number"),
        (adam(lr=-1.0), "lr of parameter group 0"),
        (adam(lr=float("nan")), "lr of parameter group 0"),
        (adam(lr=torch.tensor([1.0, 2.0])), "one element"),
        (adam(betas=(1.0, 0.9)), r"betas\[0\] of parameter group 0"),
        (adam(betas=(0.9, -0.1)), r"betas\[1\] of parameter group 0"),
        (adam(betas=0.9), "pair"),
        (adam(betas=(torch.tensor(0.9), 0.9)), r"betas\[0\]"),
        (adam(eps=-1e-8), "eps of parameter group 0"),
        (adam(weight_decay=-0.1), "weight_decay of parameter group 0"),
        (adam(weight_decay="0.1"), "weight_decay of parameter group 0"),
        ((Muon, {}), r"parameter 1 of group 0 has the shape \(10,\).*use_muon"),
        ((Muon, {"momentum": 1.0}), "momentum of parameter group 0 must be"),
        ((Muon, {"adjust_lr_fn": "none"}), "adjust_lr_fn must be one of"),
        ((Muon, {"lr": -1.0}), "lr of parameter group 0 must be"),
        ((Muon, {"ns_steps": 0}), r"from 1 to 99 ns_steps, got \(.*\) and 0"),
    ],
)
def test_wrong_settings_and_numbers_are_refused_by_name(made: Any, words: str) -> None:
    kind, settings = made
    with pytest.raises(ConfigError, match=words):
        kind(make_params(), **settings)


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), r"parameter 0 of group 0 .*complex64"),
        (("phase", torch.zeros(2, dtype=torch.complex64)), r"parameter 'phase' .*complex64"),
        (torch.zeros(1).expand(4), "expanded"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused_by_name(param: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FusedAdam([param])


def test_a_refused_group_is_not_kept() -> None:
    optimizer = FusedAdam(make_params())
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": make_params(), "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("has_stepped", [False, True])
def test_sparse_gradients_are_refused_by_name(has_stepped: bool) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = FusedAdam(embedding.named_parameters())
    if has_stepped:
        embedding.weight.grad = torch.zeros(10, 4)
        optimizer.step()
        embedding.weight.grad = None
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"the gradient of parameter 'weight' .*sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"size": (3, 3)}, r"shape \(3, 3\); expected \(4, 3\)"),
        ({"size": (4, 3), "dtype": torch.int64}, "dtype torch.int64; expected a real"),
    ],
)
def test_a_decoupled_gradient_of_another_kind_is_refused(other: Any, words: str) -> None:
    (param,) = make_params([(4, 3)])
    optimizer = FusedAdam([param], use_decoupled_grad=True)
    param.decoupled_grad = torch.zeros(4, 3)  # type: ignore[attr-defined]
    optimizer.step()
    param.decoupled_grad = torch.zeros(**other)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=words):
        optimizer.step()


def test_a_model_that_was_cast_after_the_first_step_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = FusedAdam(model.named_parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    model.double()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(ConfigError, match=r"state 'exp_avg' of parameter 'weight' .*float64"):
        optimizer.step()


def test_an_lr_may_turn_from_a_number_into_a_tensor() -> None:
    params, twins = make_twins()
    ours, theirs = FusedAdam(params, lr=0.5), FusedAdam(twins, lr=0.5)
    for lr in (0.5, torch.tensor(0.25), 0.125):
        ours.param_groups[0]["lr"] = lr
        theirs.param_groups[0]["lr"] = float(lr)
        take_steps(1, ours, theirs)
    assert_equal(params, twins)
