"""FusedAdam with moments in float16 and float8: steps, states, loading, refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adam_helpers import assert_equal, make_params, make_twins, take_steps
from adam_kernel_cases import BF16, FP8, FP16, stored
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.storage import dequantize

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MODEL_SHAPES: list[tuple[int, ...]] = [(20, 100), (100,), (3, 16, 5, 5), (0, 40), (), (6, 3)]


def make_optimizer(
    params: list[nn.Parameter], pair: tuple[torch.dtype, torch.dtype], **settings: Any
) -> FusedAdam:
    return FusedAdam(params, lr=1e-2, exp_avg_dtype=pair[0], exp_avg_sq_dtype=pair[1], **settings)


def test_vectors_and_short_rows_keep_float32_moments(device: torch.device) -> None:
    params = make_params([*MODEL_SHAPES, (70_000,)], device=device)
    optimizer = make_optimizer(params, (torch.uint8, FP16))
    take_steps(1, optimizer)
    found = [optimizer.state[param]["exp_avg"].dtype for param in params]
    wide = torch.float32
    assert found == [FP8, wide, FP8, FP8, wide, wide, FP8]
    assert optimizer.state[params[2]]["exp_avg_scale"].shape == (3, 2)
    assert optimizer.state[params[6]]["exp_avg_scale"].shape == (1, 274)
    assert "exp_avg_scale" not in optimizer.state[params[1]]


@pytest.mark.parametrize(
    "pair",
    [(FP8, FP8), (FP16, FP16), (FP8, FP16), (BF16, FP8), (BF16, BF16), (torch.float32, BF16)],
)
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_moments_are_rounded_only_when_they_are_stored(
    device: torch.device,
    pair: tuple[torch.dtype, torch.dtype],
    amsgrad: bool,
    remainders: bool,
    dtype: torch.dtype,
) -> None:
    params, twins = make_twins(MODEL_SHAPES, dtype=dtype, device=device)
    settings: dict[str, Any] = {
        "master_weights": True, "store_param_remainders": remainders, "amsgrad": amsgrad,
    }  # fmt: skip
    ours = make_optimizer(params, pair, **settings)
    reference = FusedAdam(twins, lr=1e-2, **settings)
    for _ in range(4):
        take_steps(1, ours, reference)
        assert_equal(params, twins)
        for param, twin in zip(params, twins, strict=True):
            state, other = ours.state[param], reference.state[twin]
            for key in MOMENTS if amsgrad else MOMENTS[:2]:
                if f"{key}_scale" in state:
                    expected = stored(other[key].cpu(), state[key].dtype, positive=key[-1] == "q")
                    value = dequantize(*expected).to(device)
                    assert torch.equal(dequantize(state[key], state[f"{key}_scale"]), value)
                else:
                    value = state[key].float()
                    assert torch.equal(state[key], other[key].to(state[key].dtype))
                other[key].copy_(value)  # the reference goes on from what was stored


@pytest.mark.parametrize(
    ("pair", "betas", "rtol"),
    [
        # Mean gap to the weights with float32 moments, as a share of the mean path. Each store is
        # off by up to eps / 2, by eps / 6 on average, in random directions that partly cancel: so
        # about eps of the path, with room for factor three or more.
        # Measured: 0.0006, 0.0085, 0.017.
        ((FP16, FP16), (0.9, 0.999), 2e-3),
        ((FP8, FP16), (0.9, 0.999), 3e-2),
        ((FP8, FP8), (0.9, 0.95), 5e-2),
        # With 0.999 a step changes the second moment by less than half a unit of float8, so it
        # stands still between changes of its scale: off by up to eps, here 0.125. Measured: 0.105.
        ((FP8, FP8), (0.9, 0.999), 0.3),
    ],
)
def test_a_thousand_steps_stay_with_float32_moments(
    pair: tuple[torch.dtype, torch.dtype], betas: tuple[float, float], rtol: float
) -> None:
    param = nn.Parameter(torch.randn(8, 512) * 0.02)
    twin = nn.Parameter(param.detach().clone())
    before = param.detach().clone()
    direction = torch.randn(8, 512)
    ours = make_optimizer([param], pair, betas=betas)
    theirs = FusedAdam([twin], lr=1e-2, betas=betas)
    for _ in range(1000):
        param.grad = twin.grad = 1e-3 * (torch.randn(8, 512) + direction)
        ours.step()
        theirs.step()
    gap = (param - twin).abs().mean() / (twin - before).abs().mean()
    assert gap < rtol


@pytest.mark.parametrize("saved", [(FP8, FP16), (torch.float32, torch.float32)])
@pytest.mark.parametrize("kept", [(FP8, FP16), (FP16, FP8), (torch.float32, BF16)])
def test_states_load_into_any_dtype_in_place(
    device: torch.device,
    saved: tuple[torch.dtype, torch.dtype],
    kept: tuple[torch.dtype, torch.dtype],
) -> None:
    params, twins = make_twins(MODEL_SHAPES, device=device)
    source, target = make_optimizer(params, saved), make_optimizer(twins, kept)
    take_steps(2, source, target)
    before = {key: value.data_ptr() for key, value in target.state[twins[0]].items()}
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert before == {key: value.data_ptr() for key, value in target.state[twins[0]].items()}
    for param, twin in zip(params, twins, strict=True):
        state, other = source.state[param], target.state[twin]
        for key in ("exp_avg", "exp_avg_sq"):
            value = state[key].float()
            if f"{key}_scale" in state:
                value = dequantize(state[key], state[f"{key}_scale"])
            if saved == kept:
                assert torch.equal(state[key].float(), other[key].float())
            if f"{key}_scale" in other:
                expected = stored(value.cpu(), other[key].dtype, positive=key[-1] == "q")
                assert torch.equal(other[key].cpu().float(), expected[0].float())
                assert torch.equal(other[f"{key}_scale"].cpu(), expected[1])
            else:
                assert torch.equal(other[key], value.to(other[key].dtype))


def test_float8_states_without_scales_are_refused() -> None:
    optimizer = make_optimizer(make_params(MODEL_SHAPES), (FP8, FP8))
    take_steps(1, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["exp_avg_scale"]
    with pytest.raises(ConfigError, match=r"'exp_avg' of parameter 0 .*'exp_avg_scale' is missing"):
        optimizer.load_state_dict(state)
    state["state"][0]["exp_avg_scale"] = torch.ones(3, 3)
    with pytest.raises(ConfigError, match=r"'exp_avg_scale' of parameter 0 .*expected \(20, 1\)"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "param",
    [torch.randn(64, 64).t(), torch.randn(4, 80)[:, :40], torch.randn(2, 40, 4, 4).to(
        memory_format=torch.channels_last
    )],
    ids=["transposed", "with gaps", "channels last"],
)  # fmt: skip
def test_parameters_without_rows_in_memory_are_refused(param: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"parameter 'w' .*is not contiguous. Remedy"):
        make_optimizer([("w", nn.Parameter(param))], (FP8, FP16))  # type: ignore[list-item]
    FusedAdam([nn.Parameter(param)], exp_avg_dtype=BF16)
