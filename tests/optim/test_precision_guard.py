"""The precision guard: what it accepts, what it refuses, and what its messages say."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim.adapters.precision import (
    OptimizerFacts,
    check_precision,
    main_grad_dtype,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _facts(
    *,
    decoupled: bool = False,
    main: torch.dtype | None = None,
    mixed: bool = True,
) -> OptimizerFacts:
    def main_weight_dtype(param: Tensor) -> torch.dtype:
        return main or param.dtype

    return OptimizerFacts(
        name="FusedAdam" if mixed else "torch AdamW",
        use_decoupled_grad=decoupled,
        main_weight_dtype=main_weight_dtype,
        mixed_gradients=mixed,
        keeps_main_weights=mixed,
    )


def _params(dtype: torch.dtype, *names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(2, dtype=dtype)) for name in names or ("layer.weight",)}


@pytest.mark.parametrize(
    ("param", "main", "grad", "decoupled"),
    [
        case
        for case in itertools.product([FP32, BF16], [None, FP32], [None, FP32, BF16], [True, False])
        if case[:2] != (FP32, FP32)  # a float32 parameter has no main weight apart from it
    ],
)
def test_it_accepts_exactly_what_reads_the_persistent_buffer(
    param: torch.dtype, main: torch.dtype | None, grad: torch.dtype | None, decoupled: bool
) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=grad, use_decoupled_grad=decoupled)
    facts = _facts(decoupled=decoupled, main=main)
    updated = main or param
    named = _params(param)
    assert main_grad_dtype(named["layer.weight"], policy, facts) == (grad or updated)
    if decoupled or grad in (None, updated):
        check_precision(named, policy, facts)
    else:
        with pytest.raises(PrecisionError):
            check_precision(named, policy, facts)


def test_the_message_has_both_settings_the_parameters_and_every_way_out() -> None:
    named = _params(BF16, "a.weight", "a.bias", "b.weight", "b.bias")
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=BF16)
    with pytest.raises(PrecisionError) as caught:
        check_precision(named, policy, _facts(main=FP32))
    message = str(caught.value)
    for part in (
        "mp_policy.main_params_dtype is float32",
        "mp_policy.main_grads_dtype is bfloat16",
        "'a.weight', 'a.bias', 'b.weight' and 1 more",
        "FusedAdam(..., use_decoupled_grad=True)",
        "MixedPrecisionPolicy(use_decoupled_grad=True",
        "main_grads_dtype=float32",
        "main_params_dtype=bfloat16",
        "drop main_grads_dtype",
    ):
        assert part in message


def test_only_the_parameters_that_clash_are_named() -> None:
    named = {**_params(FP32, "norm.weight"), **_params(BF16, "layer.weight")}
    with pytest.raises(PrecisionError) as caught:
        check_precision(named, MixedPrecisionPolicy(main_grads_dtype=FP32), _facts())
    assert "'layer.weight'" in str(caught.value)
    assert "norm.weight" not in str(caught.value)


@pytest.mark.parametrize("of_policy", [True, False])
def test_policy_and_optimizer_must_agree_on_decoupled_gradients(of_policy: bool) -> None:
    policy = MixedPrecisionPolicy(use_decoupled_grad=of_policy)
    words = f"use_decoupled_grad is {of_policy}, but FusedAdam reads param\\.{{}}".format(
        "grad" if of_policy else "decoupled_grad"
    )
    with pytest.raises(PrecisionError, match=words):
        check_precision(_params(FP32), policy, _facts(decoupled=not of_policy))


def test_main_weights_that_nobody_keeps_are_refused() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=FP32)
    with pytest.raises(PrecisionError, match=r"bfloat16, for 'layer.weight'.*master_weights=True"):
        check_precision(_params(BF16), policy, _facts())
    check_precision(_params(BF16), policy, _facts(main=FP32))


@pytest.mark.parametrize(("param", "grad"), [(FP32, BF16), (BF16, FP32), (FP16, FP32)])
def test_torch_optimizers_need_gradients_of_the_parameters_dtype(
    param: torch.dtype, grad: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=grad)
    with pytest.raises(PrecisionError, match="torch AdamW"):
        check_precision(_params(param), policy, _facts(mixed=False))
    check_precision(_params(param), MixedPrecisionPolicy(), _facts(mixed=False))


def test_it_is_a_configuration_error() -> None:
    assert issubclass(PrecisionError, ConfigError)
    check_precision({}, MixedPrecisionPolicy(main_grads_dtype=BF16), _facts())
