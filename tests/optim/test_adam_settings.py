"""Settings of FusedAdam beyond plain Adam: stored dtypes, remainders, amsgrad, maximize, maths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_helpers import DTYPES, assert_equal, copies_of, make_params, set_grads
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.storage import join_remainder, split_remainder_

MOMENTS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_amsgrad_and_maximize_equal_torch_bit_for_bit_on_the_cpu(
    adam_w_mode: bool, amsgrad: bool, maximize: bool
) -> None:
    params = make_params()
    twins = copies_of(params)
    make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "amsgrad": amsgrad}
    ours = FusedAdam(params, adam_w_mode=adam_w_mode, maximize=maximize, **settings)
    theirs = make(twins, maximize=maximize, fused=True, **settings)
    for step in range(6):
        set_grads(params, twins)
        for param in (*params, *twins):
            assert param.grad is not None
            param.grad.mul_(10.0 ** (-step))  # so that the largest second moment is an old one
        ours.step()
        theirs.step()
    assert_equal(params, twins)
    for param, twin in zip(params, twins, strict=True):
        for key, value in theirs.state[twin].items():
            assert torch.equal(ours.state[param][key], value), key


@pytest.mark.parametrize("first", MOMENTS)
@pytest.mark.parametrize("second", MOMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amsgrad", [True, False])
def test_moments_are_rounded_only_when_they_are_stored(
    device: torch.device,
    dtype: torch.dtype,
    first: torch.dtype,
    second: torch.dtype,
    amsgrad: bool,
) -> None:
    params = make_params(dtype=dtype, device=device)
    twins = copies_of(params)
    settings: dict[str, Any] = {"lr": 0.1, "amsgrad": amsgrad, "master_weights": True}
    ours = FusedAdam(params, exp_avg_dtype=first, exp_avg_sq_dtype=second, **settings)
    reference = FusedAdam(twins, **settings)
    for _ in range(4):
        set_grads(params, twins)
        ours.step()
        reference.step()
        for param, twin in zip(params, twins, strict=True):
            state, other = ours.state[param], reference.state[twin]
            assert state["exp_avg"].dtype == first
            assert state["exp_avg_sq"].dtype == second
            for key, value in state.items():
                torch.testing.assert_close(
                    value, other[key].to(value.dtype), rtol=torch.finfo(value.dtype).eps, atol=1e-6
                )
                other[key].copy_(value)  # the reference goes on from what was stored
            twin.data.copy_(param)


@given(bits=st.lists(st.integers(0, 0x7F7FFFFF), min_size=1), negative=st.booleans())
def test_parameter_and_remainder_are_the_exact_float32(bits: list[int], negative: bool) -> None:
    main = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    main = -main if negative else main
    param = torch.empty(len(bits), dtype=torch.bfloat16)
    remainder = torch.empty(len(bits), dtype=torch.int16)
    split_remainder_(param, remainder, main)
    assert torch.equal(join_remainder(param, remainder).view(torch.int32), main.view(torch.int32))
    nearest = main.bfloat16()
    ties = (main.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[~ties], nearest[~ties])


@pytest.mark.parametrize("grad_scale", [None, 0.5])
@pytest.mark.parametrize("maths", ["torch", "te"])
def test_remainders_train_as_float32_main_weights_do_bit_for_bit(
    device: torch.device, grad_scale: float | None, maths: str
) -> None:
    params = make_params(dtype=torch.bfloat16, device=device)
    twins = copies_of(params)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "master_weights": True}
    ours = FusedAdam(params, store_param_remainders=True, math=maths, **settings)
    theirs = FusedAdam(twins, math=maths, **settings)
    scale = None if grad_scale is None else torch.tensor(grad_scale, device=device)
    for _ in range(50):
        set_grads(params, twins)
        ours.step(grad_scale=scale)
        theirs.step(grad_scale=scale)
    for param, twin in zip(params, twins, strict=True):
        remainder = ours.state[param]["master_param"]
        assert remainder.dtype == torch.int16
        main = join_remainder(param.detach(), remainder)
        assert torch.equal(main, theirs.state[twin]["master_param"])
        torch.testing.assert_close(param, twin, rtol=2.0**-7, atol=0)  # ties round otherwise


def _float64_adam(param: Tensor, grads: list[Tensor], lr: float, decay: float) -> Tensor:
    weight = param.double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, start=1):
        gradient = grad.double()
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = weight - lr * (update + decay * weight)
    return weight


@pytest.mark.parametrize("maths", ["torch", "te"])
def test_a_thousand_steps_stay_with_float64_and_with_torch(maths: str) -> None:
    param = nn.Parameter(torch.randn(2000) * 0.02)
    twin = nn.Parameter(param.detach().clone())
    grads = [torch.randn(2000) * 1e-3 for _ in range(1000)]
    expected = _float64_adam(param.detach(), grads, 1e-3, 0.1)
    ours = FusedAdam([param], lr=1e-3, weight_decay=0.1, math=maths)
    theirs = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.1, fused=True)
    for grad in grads:
        param.grad = twin.grad = grad
        ours.step()
        theirs.step()
    # torch's 1 - lr * decay, rounded to float32, is off by up to 3e-8 of the weight in each step.
    drift = 1000 * 3e-8 * param.abs().max().item()
    close = 6e-7 if maths == "te" else 6e-7 + drift
    torch.testing.assert_close(param.double(), expected, rtol=0, atol=close)
    torch.testing.assert_close(
        param.detach(), twin.detach(), rtol=0, atol=1e-6 + drift if maths == "te" else 0
    )
    state, other = ours.state[param], theirs.state[twin]
    torch.testing.assert_close(state["exp_avg"], other["exp_avg"], rtol=1e-4, atol=1e-9)
    # 1 - 0.999 in float32 is off by 1.3e-5.
    torch.testing.assert_close(state["exp_avg_sq"], other["exp_avg_sq"], rtol=1e-4, atol=0)


def test_te_math_rounds_the_betas_to_float32() -> None:
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    optimizer = FusedAdam([param], math="te")
    optimizer.step()
    found = optimizer.state[param]["exp_avg_sq"].item()
    assert found == (1 - torch.tensor(0.999)).item() != torch.tensor(1 - 0.999).item()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: FusedAdam(p, math="fast"), "math must be one of 'torch', 'te'; got 'fast'"),
        (lambda p: FusedAdam(p, exp_avg_dtype=torch.float8_e5m2), "exp_avg_dtype .* got .*e5m2"),
        (lambda p: FusedAdam(p, exp_avg_sq_dtype=torch.int8), "exp_avg_sq_dtype .* got torch.int8"),
        (lambda p: FusedAdam(p, master_weight_dtype=torch.float16), "master_weight_dtype must"),
        (lambda p: FusedAdam(p, store_param_remainders=True), "master_weights=True, got False"),
        (lambda p: FusedAdam(p, norm_type=3.0), "norm_type must be 2 or infinity, got 3"),
        (lambda p: FusedAdam(p, max_grad_norm=0.0), "max_grad_norm must be a positive number"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    make: Callable[[list[nn.Parameter]], FusedAdam], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(make_params())
