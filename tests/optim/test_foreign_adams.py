"""Transformer Engine's FusedAdam: its recorded contract, captures, what is refused.

Replays of a stand-in are in test_optimizer_replays.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from foreign_adams import CONTRACT, make_stand_in
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.errors import GuardError
from graphfsdp.optim.adapters.foreign import _Steering


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "graphfsdp.optim.adapters.foreign.installed_version", lambda _: tuple(CONTRACT["version"])
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
