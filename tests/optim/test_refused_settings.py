"""What optimizers refuse of settings, numbers, parameters and gradients, by name.

And Transformer Engine's FusedAdam: its recorded contract, captures, what is refused. Replays of a
stand-in are in test_optimizer_replays.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from adam_helpers import make_params
from foreign_adams import CONTRACT, make_stand_in
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError, GuardError
from graphfsdp.optim import FusedAdam, Muon
from graphfsdp.optim.adapters.backends import _Steering

COMPLEX = torch.zeros(2, dtype=torch.complex64)
HERE, THERE = torch.zeros(4, 3), torch.empty(2, device="meta")


def adam(params: Any = None, **settings: Any) -> FusedAdam:
    return FusedAdam(make_params() if params is None else params, **settings)


def muon(**settings: Any) -> Muon:
    return Muon(make_params([(4, 3)]), **settings)


def step_on(*grads: Tensor, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    """Step with one gradient after the other; before the last one the model is cast."""
    param = nn.Parameter(torch.zeros(4, 3))
    optimizer = FusedAdam([("weight", param)], **settings)
    for index, grad in enumerate(grads):
        if index == len(grads) - 1:
            param.data = param.to(dtype)
        setattr(param, "decoupled_grad" if optimizer.use_decoupled_grad else "grad", grad)
        optimizer.step()


def capture(optimizer: Any, **options: Any) -> None:
    graphfsdp.capture(nn.Linear(1, 1), optimizer, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(adam, exp_avg_dtype=torch.float8_e4m3fn), "exp_avg_dtype .*bfloat16, got .*e4m3"),
        (partial(adam, exp_avg_sq_dtype=torch.float16), "exp_avg_sq_dtype .*bfloat16, got .*float"),
        (partial(adam, exp_avg_sq_dtype=torch.int8), "exp_avg_sq_dtype .* got torch.int8"),
        (partial(adam, master_weight_dtype=torch.float16), "master_weight_dtype must"),
        (partial(adam, max_grad_norm=0.0), "max_grad_norm must be a positive number"),
        (partial(adam, lr=-1.0), "lr of parameter group 0"),
        (partial(adam, lr=float("nan")), "lr of parameter group 0"),
        (partial(adam, lr=torch.tensor(0.1)), r"got tensor\(0\.1.*Remedy: a number"),
        (partial(adam, betas=(1.0, 0.9)), r"betas\[0\] of parameter group 0"),
        (partial(adam, betas=(0.9, -0.1)), r"betas\[1\] of parameter group 0"),
        (partial(adam, betas=0.9), "pair"),
        (partial(adam, betas=(torch.tensor(0.9), 0.9)), r"betas\[0\]"),
        (partial(adam, eps=-1e-8), "eps of parameter group 0"),
        (partial(adam, weight_decay=-0.1), "weight_decay of parameter group 0"),
        (partial(adam, weight_decay="0.1"), "weight_decay of parameter group 0"),
        (partial(adam, [COMPLEX]), r"parameter 0 of group 0 .*complex64"),
        (partial(adam, [("phase", COMPLEX)]), r"parameter 'phase' .*complex64"),
        (partial(adam, [torch.zeros(1).expand(4)]), "expanded"),
        (partial(Muon, [HERE, THERE]), r"parameter 1 of group 0 has the shape \(2,\).*use_muon"),
        (partial(muon, momentum=1.0), "momentum of parameter group 0 must be"),
        (partial(muon, adjust_lr_fn="none"), "adjust_lr_fn must be one of"),
        (partial(muon, lr=-1.0), "lr of parameter group 0 must be"),
        (partial(muon, ns_steps=0), r"from 1 to 99 ns_steps, got \(.*\) and 0"),
        (partial(step_on, HERE.to_sparse()), "the gradient of parameter 'weight' .*sparse"),
        (partial(step_on, HERE, HERE.to_sparse()), "the gradient of parameter 'weight' .*sparse"),
        (
            partial(step_on, HERE, torch.zeros(3, 3), use_decoupled_grad=True),
            r"shape \(3, 3\); expected \(4, 3\)",
        ),
        (
            partial(step_on, HERE, HERE.long(), use_decoupled_grad=True),
            "dtype torch.int64; expected a real",
        ),
        (
            partial(step_on, HERE, HERE.double(), dtype=torch.float64),
            "state 'exp_avg' of parameter 'weight' .*float64",
        ),
        (partial(capture, 3), r"must be a torch\.optim\.Optimizer, got int"),
        (
            lambda: capture(torch.optim.RMSprop([HERE]), skip_nonfinite=True),
            "skip_nonfinite=True.*FusedAdam",
        ),
        (
            lambda: capture(
                torch.optim.SGD([HERE], momentum=0.9, dampening=0.1), skip_nonfinite=True
            ),
            r"group 0 of torch SGD has dampening=0\.1.*dampening=0; or",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"params": [HERE], "lr": -1.0}, "lr of parameter group 1"),
        ({"params": [COMPLEX]}, r"parameter 0 of group 1 .*complex64"),
    ],
)
def test_a_refused_group_is_not_kept(group: dict[str, Any], words: str) -> None:
    optimizer = adam()
    with pytest.raises(ConfigError, match=words):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "graphfsdp.optim.adapters.backends.installed_version", lambda _: tuple(CONTRACT["version"])
    )


def test_the_adapter_asks_for_nothing_that_the_contract_lacks() -> None:
    constructor, attributes = set(CONTRACT["constructor"]), set(CONTRACT["attributes"])
    assert {"capturable", "master_weights", "_step_supports_amp_scaling"} <= attributes
    assert "grad_scaler" in CONTRACT["step"]
    assert set(CONTRACT["asks_grad_scaler_for"]) <= set(vars(_Steering))
    defaults = {
        **dict.fromkeys(
            ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"), str(torch.float32)
        ),
        **dict.fromkeys(("use_decoupled_grad", "store_param_remainders"), "False"),
    }
    assert defaults.keys() <= constructor & attributes
    assert {name: CONTRACT["defaults"][name] for name in defaults} == defaults


@pytest.mark.gpu
def test_the_real_library_is_captured() -> None:
    def run(scope: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cuda")
        optimizer = FusedAdam(model.parameters(), lr=0.1, capturable=True)
        with graphfsdp.capture(
            model, optimizer, scope=scope, loss_fn=lambda m, x: m(x).square().mean()
        ) as step:
            for _ in range(14):
                step(torch.randn(8, 64, device="cuda"))
                optimizer.param_groups[0]["lr"].mul_(0.9)
        return model.weight.detach().clone()

    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    # Without its libraries the import of Transformer Engine ends in RuntimeError or OSError.
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(str(error))
    assert torch.equal(run("none"), run("full_iteration"))


def test_their_decoupled_gradients_are_the_ones_that_are_clipped() -> None:
    model = nn.Linear(3, 1, bias=False)
    made: Any = make_stand_in(CONTRACT)
    optimizer = made(model.parameters(), lr=0.1, capturable=True, use_decoupled_grad=True)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(use_decoupled_grad=True)}
    with graphfsdp.capture(
        model, optimizer, loss_fn=lambda m, x: m(x).sum(), max_grad_norm=0.5, **options
    ) as step:
        for _ in range(14):
            step(torch.rand(4, 3) + 1)
            weight: Any = model.weight
            grad = weight.decoupled_grad  # which their kernel scales in place
            torch.testing.assert_close(grad.norm(), torch.tensor(0.5))
            assert model.weight.grad is None


def test_a_changed_weight_decay_of_theirs_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    optimizer: Any = make_stand_in(CONTRACT)(model.parameters(), lr=0.1, capturable=True)  # type: ignore[call-arg]
    with graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m(x).sum()) as step:
        for _ in range(4):
            step(torch.ones(2, 4))
        optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(GuardError, match="'weight_decay' of group 0 of Transformer Engine"):
            step(torch.ones(2, 4))
