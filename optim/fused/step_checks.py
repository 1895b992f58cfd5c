"""What the fused optimizers refuse, each refusal naming the parameter or the setting."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.errors import ConfigError, NotCopyableError
from graphfsdp.optim.fused.flat_runs import is_dense, same_layout
from graphfsdp.optim.fused.scaled_moments import (
    fits_scales,
    has_scales,
    scale_of,
    scale_shape,
)
from graphfsdp.optim.fused.step_settings import StepSettings


def check_parameter(param: Tensor, name: str) -> None:
    """Refuse a parameter that the step cannot update.

    Raises:
        ConfigError: it is sparse, complex, integer, or shares its elements' memory.
    """
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


def check_lr_device(group: Mapping[str, Any], row: int) -> None:
    """Refuse an lr that is a tensor on another device than the group's parameters.

    Raises:
        ConfigError: it would have to be read on the host in each step.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return
    for param in group["params"]:
        if param.device != lr.device:
            raise ConfigError(
                f"lr of parameter group {row} is a tensor on {lr.device}, its parameters are on "
                f"{param.device}; move lr there, or give a number, which stays live as well"
            )


def check_rows(param: Tensor, name: str) -> None:
    """Refuse a parameter whose moments are to have scales, but whose memory has no rows for them.

    Args:
        param: The parameter; a DTensor as it is.
        name: Its name for the message.

    Raises:
        ConfigError: it is not contiguous, or a DTensor that is not sharded by rows.
    """
    if not fits_scales(param):
        return
    remedy = "Remedy: exp_avg_dtype and exp_avg_sq_dtype of torch.float32 or torch.bfloat16"
    placements: Sequence[Any] = getattr(param, "placements", ())
    if not all(place.is_replicate() or place.is_shard(0) for place in placements):
        raise ConfigError(
            f"moments in float16 or float8 have scales by rows, but {name} is a DTensor with "
            f"{tuple(placements)}; expected Shard(0) or Replicate(). {remedy}"
        )
    local = local_part(param)
    if not local.is_contiguous():
        raise ConfigError(
            f"moments in float16 or float8 have scales by rows, but {name} (shape "
            f"{tuple(local.shape)}, strides {local.stride()}) is not contiguous. {remedy}, or a "
            "contiguous parameter"
        )


def check_state(
    param: Tensor, state: Mapping[str, Tensor], name: str, settings: StepSettings
) -> None:
    """Refuse state tensors that somebody has replaced by others that do not fit.

    Args:
        param: The parameter; a DTensor as it is.
        state: Its state, of a DTensor this rank's part.
        name: Its name for the message.
        settings: Those of the optimizer.

    Raises:
        ConfigError: a moment or main weight has another shape, layout, dtype or device.
    """
    local = local_part(param)
    dense = is_dense(local.shape, local.stride())
    like = local if dense else torch.empty_like(local, device="meta")
    dtypes = settings.state_dtypes(param)
    expected = {key: (like, dtype) for key, dtype in dtypes.items()}
    scale = torch.empty(scale_shape(local.shape), device="meta")
    expected |= {
        scale_of(key): (scale, torch.float32) for key, dtype in dtypes.items() if has_scales(dtype)
    }
    for key, (wanted, dtype) in expected.items():
        tensor = state.get(key)
        if (
            tensor is None
            or tensor.dtype != dtype
            or tensor.device != local.device
            or not same_layout(tensor, wanted)
        ):
            got = "missing"
            if tensor is not None:
                got = (
                    f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
                    f"{tensor.dtype}, on {tensor.device}"
                )
            raise ConfigError(
                f"the state {key!r} of {name} is {got}; expected shape {tuple(wanted.shape)}, "
                f"strides {wanted.stride()}, {dtype}, on {local.device}. It does not fit the "
                "parameter any more: was the model moved or cast after the first step? "
                "load_state_dict copies values into the right places"
            )


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    """Refuse a gradient that the step cannot read.

    Raises:
        ConfigError: the gradient is sparse, complex, integer, or of another shape or device.
    """
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


def refuse_copies(params: Iterable[Tensor]) -> None:
    """Refuse to pickle or copy an optimizer of parameters that are slices of flat buffers.

    torch can do neither with a DTensor whose local part does not begin its storage.

    Raises:
        NotCopyableError: a parameter is such a one.
    """
    if any(is_dtensor(param) and param.storage_offset() for param in params):
        raise NotCopyableError(
            "an optimizer of a sharded model cannot be pickled or copied: its parameters and its "
            "state are slices of flat buffers, as DTensors. Remedy: graphfsdp.save and "
            "graphfsdp.load, which put them into a new optimizer"
        )
