"""What FusedAdam refuses, and that it says which parameter or setting it is."""

from typing import Any

import pytest
import torch
from torch import nn

from adam_helpers import assert_equal, copies_of, make_params, set_grads
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1.0}, "lr of parameter group 0"),
        ({"lr": float("nan")}, "lr of parameter group 0"),
        ({"lr": torch.tensor([1.0, 2.0])}, "one element"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] of parameter group 0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] of parameter group 0"),
        ({"betas": 0.9}, "pair"),
        ({"betas": (torch.tensor(0.9), 0.9)}, r"betas\[0\]"),
        ({"eps": -1e-8}, "eps of parameter group 0"),
        ({"weight_decay": -0.1}, "weight_decay of parameter group 0"),
        ({"weight_decay": "0.1"}, "weight_decay of parameter group 0"),
    ],
)
def test_wrong_hyper_parameters_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FusedAdam(make_params(), **arguments)


@pytest.mark.parametrize(
    ("key", "value"), [("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", float("inf"))]
)
def test_a_value_that_becomes_wrong_is_refused_and_nothing_steps(key: str, value: object) -> None:
    params = make_params()
    before = copies_of(params)
    optimizer = FusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    set_grads(params)
    optimizer.param_groups[1][key] = value
    with pytest.raises(ConfigError, match="of parameter group 1"):
        optimizer.step()
    assert_equal(params, before)


def test_complex_and_integer_parameters_are_refused_by_name() -> None:
    complex_param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter 0 of group 0 .*complex64"):
        FusedAdam([complex_param])
    with pytest.raises(ConfigError, match=r"parameter 'phase' .*complex64"):
        FusedAdam([("phase", complex_param)])


def test_a_refused_group_is_not_kept() -> None:
    optimizer = FusedAdam(make_params())
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": make_params(), "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = FusedAdam(embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"the gradient of parameter 'weight' .*sparse"):
        optimizer.step()


def test_a_sparse_gradient_is_refused_after_dense_ones_too() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = FusedAdam(embedding.parameters())
    embedding.weight.grad = torch.zeros(10, 4)
    optimizer.step()
    embedding.weight.grad = None
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()


def test_a_decoupled_gradient_of_another_shape_is_refused() -> None:
    (param,) = make_params([(4, 3)])
    optimizer = FusedAdam([param], use_decoupled_grad=True)
    param.decoupled_grad = torch.zeros(4, 3)  # type: ignore[attr-defined]
    optimizer.step()
    param.decoupled_grad = torch.zeros(3, 3)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"shape \(3, 3\); expected \(4, 3\)"):
        optimizer.step()


def test_an_expanded_parameter_is_refused() -> None:
    param = nn.Parameter(torch.zeros(1).expand(4))
    with pytest.raises(ConfigError, match="expanded"):
        FusedAdam([param])


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
