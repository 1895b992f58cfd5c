"""FusedAdams of Transformer Engine and apex: recorded contracts, captures, what is refused."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from foreign_adams import CONTRACTS, load_source, make_stand_in, name_of
from graphfsdp.errors import GuardError
from graphfsdp.optim.adapters.foreign import APEX, TE, Facts, _Steering, find_refusal
from helpers import quick_garbage_collection

SOURCES = {
    "transformer_engine": "pytorch/optimizers/fused_adam.py",
    "apex": "optimizers/fused_adam.py",
}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("contract", CONTRACTS, ids=name_of)
def test_the_adapter_asks_for_nothing_that_a_contract_lacks(contract: dict[str, Any]) -> None:
    constructor, attributes = set(contract["constructor"]), set(contract["attributes"])
    # What the adapter reads without a default.
    assert {"capturable", "master_weights", "_step_supports_amp_scaling"} <= attributes
    assert "grad_scaler" in contract["step"]
    assert set(contract["asks_grad_scaler_for"]) <= set(vars(_Steering))
    # What it reads with a default is either an argument that is kept, or unknown.
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype", "use_decoupled_grad"):
        assert (name in constructor) == (name in attributes)
        assert contract["defaults"].get(name, "False") in ("torch.float32", "False")


@pytest.mark.parametrize("contract", CONTRACTS, ids=name_of)
def test_refusals_say_what_the_contract_does(contract: dict[str, Any]) -> None:
    name = TE if contract["package"] == "transformer_engine" else APEX
    version = tuple(contract["version"])

    def captured(**facts: Any) -> bool:
        return find_refusal(name, version, Facts(**facts)) is None

    refusals = " ".join(contract["refusals"])
    assert captured(dtensor=True) == contract["checks_dtensor_states"]
    if "exp_avg_dtype" in contract["constructor"]:
        assert captured(moments=(BF16, BF16)) == ("or both torch.bfloat16" in refusals)
        assert captured(main=torch.float16, param=BF16, grad=BF16) == (
            "only supports fp32 master weights" not in refusals
        )
    if "store_param_remainders" in contract["constructor"]:
        assert "doesn't support storing param remainders" in refusals
        assert not captured(param=BF16, grad=BF16, main=FP32, remainders=True)


def train(cls: Any, scope: str, dtype: torch.dtype, **settings: Any) -> list[list[Tensor]]:
    quick_garbage_collection()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)).to(dtype)
    optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.1, capturable=True, **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    found = []
    options: dict[str, Any] = {"max_grad_norm": 0.05, "skip_nonfinite": True}
    with graphfsdp.capture(
        model, optimizer, scope=scope, loss_fn=lambda m, x: m(x).float().square().mean(), **options
    ) as step:
        for index in range(14):
            x = torch.randn(5, 6, dtype=dtype)
            step(x * torch.inf if index in (1, 7) else x)
            scheduler.step()
            found.append([param.detach().clone() for param in model.parameters()])
        assert step.skipped_steps is not None
        assert step.skipped_steps.item() == 2
    assert optimizer.param_groups[0]["step"].item() == 12
    return found


def assert_replays(cls: Any, dtype: torch.dtype, **settings: Any) -> None:
    expected = train(cls, "none", dtype, **settings)
    for eager, replayed in zip(
        expected, train(cls, "full_iteration", dtype, **settings), strict=True
    ):
        for left, right in zip(eager, replayed, strict=True):
            assert torch.equal(left, right)
    for before, after in itertools.pairwise(range(14)):
        moved = not torch.equal(expected[before][0], expected[after][0])
        assert moved == (after not in (1, 7)), after


RUN = [c for c in CONTRACTS if tuple(c["version"]) in ((1, 10), (2, 20), (0, 1))]


@pytest.mark.parametrize("contract", RUN, ids=name_of)
def test_a_replay_clips_skips_and_follows_lr_inside_their_kernel(
    contract: dict[str, Any],
) -> None:
    assert_replays(make_stand_in(contract), FP32)


@pytest.mark.parametrize("package", SOURCES)
def test_the_python_of_the_real_library_is_captured(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_source(package, SOURCES[package])
    if module is None:
        pytest.skip(f"the Python of {package} is not installed")
    assert_replays(module.FusedAdam, FP32)
    if package == "transformer_engine":
        monkeypatch.setattr(
            "graphfsdp.optim.adapters.foreign.installed_version", lambda package: (2, 20)
        )
        assert_replays(module.FusedAdam, BF16, master_weights=True)


@pytest.mark.gpu
@pytest.mark.parametrize("package", ["transformer_engine.pytorch", "apex"])
def test_the_real_library_is_captured(package: str) -> None:
    def run(scope: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cuda")
        optimizer = module.FusedAdam(model.parameters(), lr=0.1, capturable=True)
        with graphfsdp.capture(
            model, optimizer, scope=scope, loss_fn=lambda m, x: m(x).square().mean()
        ) as step:
            for _ in range(14):
                step(torch.randn(8, 64, device="cuda"))
                optimizer.param_groups[0]["lr"].mul_(0.9)
        return model.weight.detach().clone()

    try:
        module = importlib.import_module(f"{package}.optimizers")
    # Without its libraries the import of Transformer Engine ends in RuntimeError or OSError.
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(str(error))
    assert torch.equal(run("none"), run("full_iteration"))


def test_a_changed_weight_decay_of_theirs_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    contract = next(c for c in CONTRACTS if c["version"] == [2, 20])
    optimizer: Any = make_stand_in(contract)(model.parameters(), lr=0.1, capturable=True)  # type: ignore[call-arg]
    with graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m(x).sum()) as step:
        for _ in range(4):
            step(torch.ones(2, 4))
        optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(GuardError, match="'weight_decay' of group 0 of Transformer Engine"):
            step(torch.ones(2, 4))
