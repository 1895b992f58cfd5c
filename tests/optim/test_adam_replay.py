"""Every mode of FusedAdam inside a captured iteration: a replay is the eager step, bit for bit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import DeviceGradScaler, FusedAdam
from helpers import assert_same_state, quick_garbage_collection, snapshot

NUM_STEPS = 14
BAD_STEPS = (1, 8, 9)  # one in warm-up, two in replays

MODES: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True, "maximize": True},
    "narrow moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "one narrow moment": {"exp_avg_dtype": torch.bfloat16, "adam_w_mode": False},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "all narrow": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "amsgrad": True,
    },
    "float8 and float16 moments": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.float8_e4m3fn,
        "exp_avg_sq_dtype": torch.float16,
    },
    "te": {"math": "te"},
    "te with remainders": {"math": "te", "master_weights": True, "store_param_remainders": True},
    "clip": {"max_grad_norm": 0.1},
    "clip by the largest": {"max_grad_norm": 0.01, "norm_type": math.inf},
}


def make_model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 3)).to(device, dtype)


def train(
    scope: str,
    device: torch.device,
    dtype: torch.dtype,
    settings: dict[str, Any],
    *,
    scaled: bool = False,
) -> tuple[list[dict[str, Tensor]], FusedAdam]:
    """Return the state after each call, while lr, weight decay and the batch change."""
    quick_garbage_collection()
    model = make_model(device, dtype)
    scaler = DeviceGradScaler(256.0, growth_interval=3, device=device) if scaled else None
    optimizer = FusedAdam(model.parameters(), lr=0.05, grad_scaler=scaler, **settings)

    def loss_fn(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(module(x).float(), y)
        return loss if scaler is None else scaler.scale_loss(loss)

    generator = torch.Generator().manual_seed(1)
    found = []
    with graphfsdp.capture(model, optimizer, scope=scope, loss_fn=loss_fn) as step:
        for index in range(NUM_STEPS):
            x = torch.randn(5, 6, generator=generator).to(device, dtype)
            y = torch.randn(5, 3, generator=generator).to(device)
            skips = settings.get("skip_nonfinite") or scaled
            if skips and index in BAD_STEPS:
                x = x * math.inf
            step(x, y)
            group = optimizer.param_groups[0]
            group["lr"], group["weight_decay"] = 0.05 / (index + 1), 0.01 * index
            state = snapshot(model, optimizer)
            state["skipped"] = optimizer.control.skipped_steps.clone()
            state["norm"] = optimizer.control.grad_norm.clone()
            if scaler is not None:
                state["scale"] = scaler.scale.clone()
            found.append(state)
    return found, optimizer


def check(device: torch.device, dtype: torch.dtype, settings: dict[str, Any], **how: bool) -> None:
    expected, _ = train("none", device, dtype, settings, **how)
    found, _ = train("full_iteration", device, dtype, settings, **how)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same_state(one, other, f"after call {index}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_equals_the_eager_step(
    device: torch.device, mode: str, dtype: torch.dtype
) -> None:
    check(device, dtype, MODES[mode])


@pytest.mark.parametrize("maths", ["torch", "te"])
def test_a_replay_skips_where_the_eager_step_does(device: torch.device, maths: str) -> None:
    settings = {"skip_nonfinite": True, "math": maths, "max_grad_norm": 1.0}
    check(device, torch.float32, settings)
    found, optimizer = train("full_iteration", device, torch.float32, settings)
    assert optimizer.control.skipped_steps.item() == len(BAD_STEPS)
    for state in optimizer.state.values():
        assert state["step"].item() == NUM_STEPS - len(BAD_STEPS)
    assert all(tensor.isfinite().all() for key, tensor in found[-1].items() if key != "norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_loss_scale_moves_in_replays(device: torch.device, dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"master_weights": True}
    check(device, dtype, settings, scaled=True)
    found, _ = train("full_iteration", device, dtype, settings, scaled=True)
    scales = {state["scale"].item() for state in found}
    assert len(scales) > 2
