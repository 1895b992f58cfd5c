"""The settings of a FusedAdam that hold for all groups, and what optimizers of ours refuse.

Each refusal names the parameter or the setting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.errors import ConfigError

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MOMENT_DTYPES = (torch.float32, torch.bfloat16)


class Flags(NamedTuple):
    adam_w_mode: bool = True  # decoupled weight decay; otherwise decay is added to the gradient
    bias_correction: bool = True
    maximize: bool = False


@dataclass(frozen=True)
class StepSettings:
    """What the constructor was told; see ``FusedAdam``."""

    flags: Flags
    use_decoupled_grad: bool
    master_weights: bool
    skip_nonfinite: bool
    max_grad_norm: float | None
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    amsgrad: bool = False

    def __post_init__(self) -> None:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(self, name)
            if dtype not in _MOMENT_DTYPES:
                raise ConfigError(f"{name} must be torch.float32 or torch.bfloat16, got {dtype}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be a positive number, got {self.max_grad_norm}")

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        wide = self.master_weights and param.dtype in _LOW_PRECISION
        return torch.float32 if wide else param.dtype

    def state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """Without step count."""
        first, second = self.exp_avg_dtype, self.exp_avg_sq_dtype
        if param.dtype == torch.float64:
            first = second = torch.float64
        dtypes = {"exp_avg": first, "exp_avg_sq": second}
        if self.amsgrad:
            dtypes["max_exp_avg_sq"] = second
        main = self.main_weight_dtype(param)
        if main != param.dtype:
            dtypes["master_param"] = main
        return dtypes

    def in_groups(self) -> dict[str, bool]:
        """Return what torch's Adams have in each group, not once for all of them."""
        return {
            "amsgrad": self.amsgrad,
            "maximize": self.flags.maximize,
            "bias_correction": self.flags.bias_correction,
            "decoupled_weight_decay": self.flags.adam_w_mode,
        }


def check_main_dtype(master_weight_dtype: torch.dtype) -> None:
    if master_weight_dtype != torch.float32:
        raise ConfigError(f"master_weight_dtype must be torch.float32, got {master_weight_dtype}")


def parameter_name(groups: Sequence[Mapping[str, Any]]) -> Callable[[int, int], str]:
    """Return a function from group and position to the parameter's name for messages."""

    def name(row: int, position: int) -> str:
        names = groups[row].get("param_names")
        if names is not None:
            return f"parameter {names[position]!r}"
        return f"parameter {position} of group {row}"

    return name


def check_parameter(param: Tensor, name: str) -> None:
    if param.layout != torch.strided or not param.dtype.is_floating_point:
        raise ConfigError(
            f"only dense tensors of a real floating-point dtype can be trained; {name} has the "
            f"layout {param.layout} and the dtype {param.dtype}"
        )
    if any(size > 1 and step == 0 for size, step in zip(param.shape, param.stride(), strict=True)):
        raise ConfigError(
            f"{name} is expanded (shape {tuple(param.shape)}, strides {param.stride()}), so that "
            f"several elements share one place in memory; give a contiguous copy"
        )


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    problem = None
    if grad.layout != torch.strided:
        problem = (
            f"has the layout {grad.layout}; expected a dense one (for nn.Embedding: sparse=False)"
        )
    elif not grad.dtype.is_floating_point:
        problem = f"has the dtype {grad.dtype}; expected a real floating-point dtype"
    elif grad.shape != param.shape:
        problem = f"has the shape {tuple(grad.shape)}; expected {tuple(param.shape)}"
    elif grad.device != param.device:
        problem = f"is on {grad.device}; expected {param.device}, as its parameter"
    if problem is not None:
        raise ConfigError(f"the gradient of {name} {problem}")
