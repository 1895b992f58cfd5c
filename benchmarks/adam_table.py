"""The table of bytes per parameter in docs/fused_adam.md, counted from the tensors of a step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphfsdp.bench.tables import Table
from graphfsdp.optim import FusedAdam

_FP32, _BF16 = torch.float32, torch.bfloat16
_NARROW = MappingProxyType({"exp_avg_dtype": _BF16, "exp_avg_sq_dtype": _BF16})
# A moment of few bits stands still where a step changes it by less than half a unit, so the second
# one, which moves slowly, has more of them.
_SCALED = MappingProxyType(
    {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16}
)
_SCALED_8 = MappingProxyType(
    {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}
)
_HALVES = MappingProxyType({"master_weights": True, "store_param_remainders": True})


class Case(NamedTuple):
    """One row: bytes per parameter of others, or why there are none.

    Transformer Engine's are with ``capturable=True``, which writes the gradient back; torch's are
    those of ``AdamW(fused=True)``.
    """

    settings: Mapping[str, Any]
    param: torch.dtype
    grad: torch.dtype
    te: str
    torch: str


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "fp32": Case({}, _FP32, _FP32, "32", "28"),
        "fp32, bf16 moments": Case(_NARROW, _FP32, _FP32, "24", "20"),
        "bf16, fp32 main weight": Case({"master_weights": True}, _BF16, _BF16, "30", "-"),
        "bf16, fp32 main weight and gradient": Case(
            {"master_weights": True}, _BF16, _FP32, "34", "-"
        ),
        "bf16, fp32 main weight, bf16 moments": Case(
            {"master_weights": True, **_NARROW}, _BF16, _BF16, "22", "-"
        ),
        "bf16, int16 remainder": Case(_HALVES, _BF16, _BF16, "not capturable", "-"),
        "bf16, int16 remainder, bf16 moments": Case(
            {**_HALVES, **_NARROW}, _BF16, _BF16, "not capturable", "-"
        ),
        "bf16, fp32 main weight, fp8 and fp16 moments": Case(
            {"master_weights": True, **_SCALED}, _BF16, _BF16, "not capturable", "-"
        ),
        "bf16, int16 remainder, fp8 and fp16 moments": Case(
            {**_HALVES, **_SCALED}, _BF16, _BF16, "not capturable", "-"
        ),
        "bf16, int16 remainder, fp8 moments": Case(
            {**_HALVES, **_SCALED_8}, _BF16, _BF16, "not capturable", "-"
        ),
        "all bf16": Case(_NARROW, _BF16, _BF16, "16", "14"),
    }
)


def bytes_per_param(
    settings: Mapping[str, Any], param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> float:
    """Return the bytes that one step reads and writes for each element of a parameter.

    State tensors are read and written, gradients read. A model weight is read and written, or only
    written where there is a float32 main weight. Scales are counted as for rows of a multiple of
    256 elements. What clipping and the skip of non-finite gradients read once more is not counted.
    """
    param = torch.nn.Parameter(torch.zeros((2, 256), dtype=param_dtype))
    optimizer = FusedAdam([param], use_decoupled_grad=True, **settings)
    param.decoupled_grad = torch.ones_like(param, dtype=grad_dtype)  # type: ignore[attr-defined]
    optimizer.step()
    state = optimizer.state[param]
    written = param.nbytes + sum(value.nbytes for key, value in state.items() if key != "step")
    read = written + param.numel() * grad_dtype.itemsize
    if state.get("master_param", param).dtype != param_dtype and not settings.get(
        "store_param_remainders"
    ):
        read -= param.nbytes
    moved: float = (read + written) / param.numel()
    return moved


def bytes_table() -> str:
    rows = []
    for name, case in CASES.items():
        ours = bytes_per_param(case.settings, case.param, case.grad)
        rows.append((name, f"{ours:.4g}", case.te, case.torch))
    return Table("", ("weights", "FusedAdam", "TE, capturable", "torch fused"), rows).markdown()
