"""Device tables of parameters, and the launch of the Triton kernels that walk through them.

Shapes: P = parameters, B = blocks of all parameters, G = groups.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphfsdp.optim.fused.state import Flags
from graphfsdp.optim.fused.update import AdamCoefficients, Columns, Dtypes, StepTensors

# Elements that one program of the kernel updates; 8 for each of 128 threads, which is one access
# of 16 bytes to 16-bit numbers. Those at the end of a parameter are updated in parts.
BLOCK_NUMEL = 1024
PART_NUMEL = 256
NUM_WARPS = 4

# Columns of the table; a missing tensor has address 0.
COLUMNS = (*StepTensors._fields, "numel", "step", "row", "first_block")
NUM_COEFFICIENTS = len(AdamCoefficients._fields)

_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Tables(NamedTuple):
    """What the kernel knows about the parameters, on the device; addresses are in bytes."""

    params: Tensor  # [P, 10] int64, see COLUMNS
    block_to_param: Tensor  # [B] int32, whose each block is


@functools.cache
def is_available() -> bool:
    """Return whether Triton can be imported; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def supports(dtypes: Dtypes) -> bool:
    return all(dtype is None or dtype in _KERNEL_DTYPES for dtype in dtypes)


def make_tables(
    params: Sequence[StepTensors],
    steps: Sequence[Tensor],  # [] float32, the step count of each
    rows: Sequence[int],  # of the hyper-parameter table
    device: torch.device,
) -> Tables:
    """Stale when a tensor moves. Capture: copies from the host: not inside, but in warm-up."""
    table = np.zeros((len(params), len(COLUMNS)), dtype=np.int64)
    for index, (tensors, step, row) in enumerate(zip(params, steps, rows, strict=True)):
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        table[index, :-1] = [*addresses, tensors.param.numel(), step.data_ptr(), row]
    counts = -(-table[:, COLUMNS.index("numel")] // BLOCK_NUMEL)
    table[:, -1] = np.cumsum(counts) - counts
    blocks = np.repeat(np.arange(len(params), dtype=np.int32), counts)
    return Tables(*(torch.from_numpy(array).to(device) for array in (table, blocks)))


def launch(
    tables: Tables,
    columns: Columns,
    hyper: Tensor,  # [G, 5] float64
    grad_scale: Tensor | None,  # [] float, multiplies every gradient
    found_inf: Tensor | None,  # [] float, nothing is changed unless it is zero
    flags: Flags,
) -> None:
    """Update all parameters of a dtype combination: one small kernel for the scalars, one for all.

    It moves 16 bytes at a time where all addresses are multiples of 16. The step counts must have
    been advanced already.

    Capture: no host sync, no copy from the host; the addresses in the tables, the tables
        themselves and ``hyper`` must stay.
    """
    kernels = _kernels()
    num_params = tables.params.shape[0]
    coefficients = torch.empty(
        (num_params, NUM_COEFFICIENTS), dtype=torch.float32, device=hyper.device
    )
    scale = coefficients if grad_scale is None else grad_scale.to(torch.float32)
    skip = coefficients if found_inf is None else found_inf.to(torch.float32)
    with torch.cuda.device_of(hyper):
        kernels.coefficients_kernel[(num_params,)](
            tables.params,
            hyper,
            coefficients,
            BIAS_CORRECTION=flags.bias_correction,
            num_warps=1,
            enable_fp_fusion=False,
        )
        kernels.update_kernel[(tables.block_to_param.shape[0],)](
            tables.params,
            tables.block_to_param,
            coefficients,
            scale,
            skip,
            **constants(
                columns.dtypes(),
                flags,
                has_scale=grad_scale is not None,
                has_skip=found_inf is not None,
                aligned=not any(tensor.data_ptr() % 16 for column in columns for tensor in column),
            ),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def constants(
    dtypes: Dtypes,
    flags: Flags,
    *,
    has_scale: bool,
    has_skip: bool,
    aligned: bool,
) -> dict[str, Any]:
    return {
        "PARAM_DTYPE": _in_triton(dtypes.param),
        "GRAD_DTYPE": _in_triton(dtypes.grad),
        "FIRST_DTYPE": _in_triton(dtypes.exp_avg),
        "SECOND_DTYPE": _in_triton(dtypes.exp_avg_sq),
        "HAS_MAIN": dtypes.main_param is not None,
        "AMSGRAD": dtypes.max_exp_avg_sq is not None,
        "HAS_SCALE": has_scale,
        "HAS_SKIP": has_skip,
        "ADAM_W_MODE": flags.adam_w_mode,
        "MAXIMIZE": flags.maximize,
        "ALIGNED": aligned,
        "BLOCK_NUMEL": BLOCK_NUMEL,
        "PART_NUMEL": PART_NUMEL,
    }


def _in_triton(dtype: torch.dtype) -> Any:
    return getattr(_kernels().tl, str(dtype).removeprefix("torch."))


def _kernels() -> Any:
    # Late, so that importing graphfsdp.optim needs no Triton.
    from graphfsdp.optim.fused import triton_kernels

    return triton_kernels
