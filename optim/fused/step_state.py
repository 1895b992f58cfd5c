"""Where the fused optimizers keep their state: slices of one buffer per device and dtype.

Shapes: [...] the parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like, wrap_rows_like
from graphfsdp.base.host_memory import zeros_flat
from graphfsdp.optim.fused.flat_runs import is_dense
from graphfsdp.optim.fused.scaled_moments import has_scales, scale_of, scale_shape
from graphfsdp.optim.fused.step_settings import StepSettings

State = dict[str, Tensor]

# States that do not continue their neighbour start on a border of this many elements, which is
# a multiple of 16 bytes in every dtype.
BORDER_NUMEL = 64


def create_states(
    params: Sequence[tuple[int, Tensor]],  # row of the group, parameter
    settings: StepSettings,
) -> dict[Tensor, State]:
    """Allocate the state of parameters, so that neighbouring parameters have neighbouring states.

    Moments have the dtypes of the settings (float64 for a float64 parameter) and the parameter's
    strides, and start at zero. A main weight starts as the parameter, so a remainder as zero. Step
    counts are slices of one buffer, so that advancing all of them is one operation.

    Returns:
        ``step`` [] float32, ``exp_avg`` and ``exp_avg_sq`` [...], and ``max_exp_avg_sq`` and
        ``master_param`` [...] where there are such, for each parameter; with ``_scale`` behind
        its name, the scales [rows, blocks of a row] float32 of a moment that has some. All but
        ``step`` are DTensors where the parameter is one.
    """
    locals_ = {local: param for _, param in params for local in [local_part(param)]}
    ordered = sorted(
        ((row, local) for (row, _), local in zip(params, locals_, strict=True)), key=_memory_order
    )
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, local in ordered:
        by_device.setdefault(local.device, []).append(local)
    states: dict[Tensor, State] = {}
    for device, members in by_device.items():
        steps = torch.zeros(len(members), dtype=torch.float32, device=device)
        for param, step in zip(members, steps.unbind(), strict=True):
            states[param] = {"step": step}
        wanted: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for param in members:
            for name_and_dtype in settings.state_dtypes(locals_[param]).items():
                wanted.setdefault(name_and_dtype, []).append(param)
        for (name, dtype), owners in sorted(wanted.items(), key=lambda item: str(item[0])):
            for param, tensor in zip(owners, _like(owners, dtype), strict=True):
                states[param][name] = tensor
                if name == "master_param" and dtype != torch.int16:
                    tensor.copy_(param.detach())
            if has_scales(dtype):
                for param, scale in zip(owners, _scales(owners), strict=True):
                    states[param][scale_of(name)] = scale
    return {
        param: {key: _wrap(key, value, param) for key, value in states[local].items()}
        for local, param in locals_.items()
    }


def _wrap(key: str, value: Tensor, param: Tensor) -> Tensor:
    if key == "step":
        return value
    if key.endswith("_scale"):
        return wrap_rows_like(value, param)
    return wrap_like(value, param)


def _scales(params: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros [rows, blocks of a row] for each parameter, as slices of one buffer."""
    shapes = [scale_shape(param.shape) for param in params]
    sizes = [rows * blocks for rows, blocks in shapes]
    buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=params[0].device)
    return [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


def step_classes(states: Mapping[Tensor, State], known: Mapping[Tensor, int]) -> dict[Tensor, int]:
    """Number the parameters so that only such with equal step counts have equal numbers.

    Reads the counts on the host: not for the hot path.

    Args:
        states: State by parameter.
        known: Numbers so far. What they tell apart stays apart, whatever the counts are now: a
            graph may step one of two parameters, and a replay tells nobody.
    """
    keys = {
        param: (known.get(param, -1), int(state["step"].item()))
        for param, state in states.items()
        if state
    }
    return _numbered(keys)


def split_classes(classes: Mapping[Tensor, int], stepped: Iterable[Tensor]) -> dict[Tensor, int]:
    """Return new numbers for the case that only some parameters take the next step.

    Args:
        classes: Numbers as from ``step_classes`` or this function.
        stepped: The parameters that take the step; those that ``classes`` does not know yet are
            new, with a step count of zero.

    Returns:
        Numbers with which parameters have equal counts after the step if their numbers are equal.
    """
    active = set(stepped)
    return _numbered(
        {param: (classes.get(param, -1), param in active) for param in {*classes, *active}}
    )


def _numbered(keys: Mapping[Tensor, tuple[int, int]]) -> dict[Tensor, int]:
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    return {param: numbers[key] for param, key in keys.items()}


def _memory_order(item: tuple[int, Tensor]) -> tuple[str, str, int, int, int, int]:
    row, param = item
    # A sharded parameter of no row lies where its successor does: behind it, it would part
    # neighbours.
    return (
        str(param.device),
        str(param.dtype),
        row,
        param.untyped_storage().data_ptr(),
        int(param.storage_offset()),
        param.numel(),
    )


def _like(params: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return zeros shaped and strided like ``params``, as slices of one buffer."""
    offsets: list[int] = []
    end = 0
    previous: Tensor | None = None
    for param in params:
        # Parameters with scales are no neighbours to the kernel.
        if previous is None or has_scales(dtype) or not continues(previous, param):
            end = -(-end // BORDER_NUMEL) * BORDER_NUMEL
        offsets.append(end)
        end += param.numel()
        previous = param
    if not params:
        return []
    buffer = zeros_flat(end, dtype, params[0].device)
    return [
        buffer.as_strided(param.shape, param.stride(), offset)
        if is_dense(param.shape, param.stride())
        else buffer[offset : offset + param.numel()].view(param.shape)
        for param, offset in zip(params, offsets, strict=True)
    ]


def continues(left: Tensor, right: Tensor) -> bool:
    """Return whether a tensor begins in memory where another ends."""
    return (
        left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.dtype == right.dtype
        and left.storage_offset() + left.numel() == right.storage_offset()
    )
