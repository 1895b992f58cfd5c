"""The precision guard: what it accepts, and that a replay has the bits of eager with it."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import ConfigError, MixedPrecisionPolicy, PrecisionError
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_run, run
from zoo_models import WIDTH, Squared

BF16, FP32 = torch.bfloat16, torch.float32


def make_model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 3))
    return net.to(device, dtype)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x.to(next(model.parameters()).dtype))
    return loss


ACCEPTED: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any], torch.dtype]] = {
    # parameter dtype, FusedAdam's arguments, policy, dtype of the bound gradient
    "float32": (FP32, {}, {}, FP32),
    "bfloat16": (BF16, {}, {}, BF16),
    "main_weights": (BF16, {"master_weights": True}, {}, FP32),
    "main_weights_named": (
        BF16,
        {"master_weights": True},
        {"main_params_dtype": FP32, "main_grads_dtype": FP32},
        FP32,
    ),
    "decoupled_float32": (
        BF16,
        {"use_decoupled_grad": True, "master_weights": True},
        {"main_grads_dtype": FP32, "use_decoupled_grad": True},
        FP32,
    ),
    "decoupled_bfloat16_with_main_weights": (
        BF16,
        {"use_decoupled_grad": True, "master_weights": True},
        {"main_params_dtype": FP32, "main_grads_dtype": BF16, "use_decoupled_grad": True},
        BF16,
    ),
    "decoupled_bfloat16_for_float32": (
        FP32,
        {"use_decoupled_grad": True},
        {"main_grads_dtype": BF16, "use_decoupled_grad": True},
        BF16,
    ),
}


@pytest.mark.parametrize(
    ("name", "microbatches"), [(name, 1 + index % 2) for index, name in enumerate(ACCEPTED)]
)
def test_accepted_precisions_replay_as_eager_runs(
    name: str, microbatches: int, device: torch.device
) -> None:
    dtype, arguments, policy, grad_dtype = ACCEPTED[name]
    kind = "decoupled_grad" if "use_decoupled_grad" in arguments else "grad"

    def look(step: graphfsdp.CapturedStep, model: nn.Module, index: int) -> None:
        assert step.grad_norm is not None
        assert step.grad_norm.dtype == FP32
        assert all(getattr(param, kind).dtype == grad_dtype for param in model.parameters())
        num_bytes = grad_dtype.itemsize * sum(param.numel() for param in model.parameters())
        assert step.report().gradient_bytes >= num_bytes

    case = Case(
        lambda: make_model(device, dtype),
        lambda generator: Batch((torch.randn(8, WIDTH, generator=generator),)),
        loss_fn,
    )
    options: dict[str, Any] = {
        "optimizer": lambda params: FusedAdam(params, weight_decay=0.1, **arguments),
        "max_grad_norm": 0.5,
        "microbatches": microbatches,
        "mp_policy": MixedPrecisionPolicy(**policy),
        "between": look,
    }
    expected = run(case, "none", device, **options)
    for scope in ("full_iteration", "forward_backward"):
        assert_same_run(expected, run(case, scope, device, **options))


@pytest.mark.parametrize(
    "name", ["param_dtype", "main_params_dtype", "main_grads_dtype", "grad_comm_dtype"]
)
def test_a_policy_takes_floating_point_dtypes_only(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a floating-point.*torch.int32"):
        MixedPrecisionPolicy(**{name: torch.int32})  # type: ignore[arg-type]


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
    model = nn.Linear(2, 1, dtype=param)
    optimizer = FusedAdam(
        model.parameters(), use_decoupled_grad=decoupled, master_weights=main is not None
    )
    policy = MixedPrecisionPolicy(main_grads_dtype=grad, use_decoupled_grad=decoupled)
    reads_it = decoupled or grad in (None, main or param)
    with (
        nullcontext() if reads_it else pytest.raises(PrecisionError),
        graphfsdp.capture(model, optimizer, mp_policy=policy),
    ):
        pass


def test_only_the_parameters_that_clash_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=BF16), nn.LayerNorm(2))
    policy = MixedPrecisionPolicy(main_grads_dtype=FP32)
    with pytest.raises(PrecisionError) as caught:
        graphfsdp.capture(model, FusedAdam(model.parameters()), mp_policy=policy)
    assert "'0.weight'" in str(caught.value)
    assert "'1.weight'" not in str(caught.value)
