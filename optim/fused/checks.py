"""What optimizers of ours refuse, each refusal naming the parameter or the setting."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part
from graphfsdp.base.flat_buffer import is_dense
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.settings import StepSettings
from graphfsdp.optim.fused.storage import same_layout


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


def check_state(
    param: Tensor, state: Mapping[str, Tensor], name: str, settings: StepSettings
) -> None:
    local = local_part(param)
    dense = is_dense(local.shape, local.stride())
    like = local if dense else torch.empty_like(local, device="meta")
    for key, dtype in settings.state_dtypes(param).items():
        tensor = state.get(key)
        if (
            tensor is None
            or tensor.dtype != dtype
            or tensor.device != local.device
            or not same_layout(tensor, like)
        ):
            got = "missing"
            if tensor is not None:
                got = (
                    f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
                    f"{tensor.dtype}, on {tensor.device}"
                )
            raise ConfigError(
                f"the state {key!r} of {name} is {got}; expected shape {tuple(like.shape)}, "
                f"strides {like.stride()}, {dtype}, on {local.device}. It does not fit the "
                "parameter any more: was the model moved or cast after the first step? "
                "load_state_dict copies values into the right places"
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
