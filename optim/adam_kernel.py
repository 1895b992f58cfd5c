"""Device tables of flat runs, and the launch of the Triton kernels that walk through them.

Shapes: R = flat runs, B = blocks of all runs, L = lanes, G = groups.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphfsdp.optim.adam_settings import Flags
from graphfsdp.optim.flat_runs import Bundle

# Elements that one program of the kernel updates; 16 for each of 128 threads.
BLOCK_NUMEL = 2048
NUM_WARPS = 4

# Columns of the run table; a missing tensor has address 0.
ADDRESSES = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "main_param")
RUN_COLUMNS = (*ADDRESSES, "numel", "lane", "first_block")
LANE_COLUMNS = ("step", "row")
# The fields of adam_math.AdamCoefficients.
NUM_COEFFICIENTS = 12

_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Tables(NamedTuple):
    """What the kernel knows about the runs, on the device.

    Attributes:
        lanes: [L, 2] int64, address of a step count and row of the hyper-parameter table.
        runs: [R, 9] int64, see ``RUN_COLUMNS``; addresses are in bytes, multiples of 16.
        block_to_run: [B] int32, the run that each block belongs to.
        odd_runs: [R, 9] int64, the runs with an address that is no multiple of 16.
        odd_block_to_run: [B] int32, the same for those.
    """

    lanes: Tensor
    runs: Tensor
    block_to_run: Tensor
    odd_runs: Tensor
    odd_block_to_run: Tensor


class Dtypes(NamedTuple):
    """Storage dtypes of one launch; None where there is no such tensor.

    A ``main_param`` of int16 holds remainders, see ``remainders``.
    """

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    max_exp_avg_sq: torch.dtype | None
    main_param: torch.dtype | None


@functools.cache
def is_available() -> bool:
    """Return whether Triton can be imported; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def supports(dtypes: Dtypes) -> bool:
    """Return whether the kernel knows these storage dtypes."""
    floats = dtypes[:-1] if dtypes.main_param == torch.int16 else dtypes
    return all(dtype is None or dtype in _KERNEL_DTYPES for dtype in floats)


def make_tables(
    runs: Sequence[Bundle],  # tensors in the order of ADDRESSES, None where there is none
    lane_of_run: Sequence[int],
    lanes: Sequence[tuple[Tensor, int]],  # first step count of the lane; its row
    device: torch.device,
) -> Tables:
    """Build the tables of one launch.

    Args:
        lane_of_run: Index in ``lanes`` of each run.
        device: Where the kernel runs.

    Returns:
        The tables; they hold addresses, so they are stale when a tensor moves.

    Capture: copies from the host: never inside a capture, but in warm-up.
    """
    rows = [
        [
            *(0 if tensor is None else tensor.data_ptr() for tensor in run),
            next(tensor.numel() for tensor in run if tensor is not None),
            lane,
        ]
        for run, lane in zip(runs, lane_of_run, strict=True)
    ]
    even: list[list[int]] = []
    odd: list[list[int]] = []
    for row in rows:
        on_border = not any(address % 16 for address in row[: len(ADDRESSES)])
        (even if on_border else odd).append(row)
    lane_table = np.array([[step.data_ptr(), row] for step, row in lanes], dtype=np.int64)
    arrays = [lane_table, *_run_arrays(even), *_run_arrays(odd)]
    return Tables(*(torch.from_numpy(array).to(device) for array in arrays))


def _run_arrays(rows: list[list[int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    table = np.zeros((len(rows), len(RUN_COLUMNS)), dtype=np.int64)
    if rows:
        table[:, :-1] = rows
    num_blocks = -(-table[:, RUN_COLUMNS.index("numel")] // BLOCK_NUMEL)
    table[:, -1] = np.cumsum(num_blocks) - num_blocks
    return table, np.repeat(np.arange(len(rows), dtype=np.int32), num_blocks)


def launch(
    tables: Tables,
    dtypes: Dtypes,
    hyper: Tensor,  # [G, 5] float64
    grad_scale: Tensor | None,  # [] float, multiplies every gradient
    found_inf: Tensor | None,  # [] float, nothing is changed unless it is zero
    flags: Flags,
) -> None:
    """Update all runs of one dtype combination: one small kernel for the scalars, one for all.

    Runs with an address that is no multiple of 16, if any, need a second launch of the latter.
    The step counts must have been advanced already.

    Capture: no host sync, no copy from the host; the addresses in the tables, the tables
        themselves and ``hyper`` must stay.
    """
    kernels = _kernels()
    coefficients = torch.empty(
        (tables.lanes.shape[0], NUM_COEFFICIENTS), dtype=torch.float32, device=hyper.device
    )
    scale = coefficients if grad_scale is None else grad_scale.to(torch.float32)
    skip = coefficients if found_inf is None else found_inf.to(torch.float32)
    with torch.cuda.device_of(hyper):
        kernels.coefficients_kernel[(tables.lanes.shape[0],)](
            tables.lanes,
            hyper,
            coefficients,
            ADAM_W_MODE=flags.adam_w_mode,
            BIAS_CORRECTION=flags.bias_correction,
            TE_MATH=flags.te_math,
            num_warps=1,
            enable_fp_fusion=False,
        )
        for runs, block_to_run, aligned in (
            (tables.runs, tables.block_to_run, True),
            (tables.odd_runs, tables.odd_block_to_run, False),
        ):
            if not runs.shape[0]:
                continue
            kernels.update_kernel[(block_to_run.shape[0],)](
                runs,
                block_to_run,
                coefficients,
                scale,
                skip,
                **constants(
                    dtypes,
                    flags,
                    has_scale=grad_scale is not None,
                    has_skip=found_inf is not None,
                    aligned=aligned,
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
    """Return the compile-time arguments of the update kernel."""
    language = _kernels().tl
    names = {
        None: "float32",
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
        torch.int16: "int16",
    }
    halves = dtypes.main_param == torch.int16
    return {
        # With remainders, the model weight is the upper half of an integer.
        "PARAM_DTYPE": language.int16 if halves else getattr(language, names[dtypes.param]),
        "GRAD_DTYPE": getattr(language, names[dtypes.grad]),
        "FIRST_DTYPE": getattr(language, names[dtypes.exp_avg]),
        "SECOND_DTYPE": getattr(language, names[dtypes.exp_avg_sq]),
        "MAIN_DTYPE": getattr(language, names[dtypes.main_param]),
        "HAS_MAIN": dtypes.main_param is not None and not halves,
        "HALVES": halves,
        "AMSGRAD": dtypes.max_exp_avg_sq is not None,
        "HAS_SCALE": has_scale,
        "HAS_SKIP": has_skip,
        "ADAM_W_MODE": flags.adam_w_mode,
        "MAXIMIZE": flags.maximize,
        "TE_MATH": flags.te_math,
        "ALIGNED": aligned,
        "BLOCK_NUMEL": BLOCK_NUMEL,
    }


def _kernels() -> Any:
    # Late, so that importing graphfsdp.optim needs no Triton.
    from graphfsdp.optim import adam_triton

    return adam_triton


__all__ = [
    "ADDRESSES",
    "BLOCK_NUMEL",
    "LANE_COLUMNS",
    "NUM_COEFFICIENTS",
    "NUM_WARPS",
    "RUN_COLUMNS",
    "Dtypes",
    "Tables",
    "constants",
    "is_available",
    "launch",
    "make_tables",
    "supports",
]
