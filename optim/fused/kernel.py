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

from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import Dtypes, StepTensors
from graphfsdp.optim.fused.update import AdamCoefficients

# Elements that one program of the kernel updates; 8 for each of 128 threads, which is one access
# of 16 bytes to 16-bit numbers. Those at the end of a run are updated in parts.
BLOCK_NUMEL = 1024
PART_NUMEL = 256
NUM_WARPS = 4

# Columns of the run table; a missing tensor has address 0.
ADDRESSES = StepTensors._fields
RUN_COLUMNS = (*ADDRESSES, "numel", "lane", "first_block")
NUM_COEFFICIENTS = len(AdamCoefficients._fields)

_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Tables(NamedTuple):
    """What the kernel knows about the runs, on the device; addresses are in bytes."""

    lanes: Tensor  # [L, 2] int64, address of a step count and row of the hyper-parameter table
    runs: Tensor  # [R, 9] int64, see RUN_COLUMNS; addresses are multiples of 16
    block_to_run: Tensor  # [B] int32, the run that each block belongs to
    odd_runs: Tensor  # [R, 9] int64, the runs with an address that is none
    odd_block_to_run: Tensor  # [B] int32


@functools.cache
def is_available() -> bool:
    """Return whether Triton can be imported; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def supports(dtypes: Dtypes) -> bool:
    return all(dtype is None or dtype in _KERNEL_DTYPES for dtype in dtypes)


def make_tables(
    runs: Sequence[StepTensors],
    lane_of_run: Sequence[int],  # index in `lanes` of each run
    lanes: Sequence[tuple[Tensor, int]],  # first step count of the lane; its row
    device: torch.device,
) -> Tables:
    """Stale when a tensor moves. Capture: copies from the host: not inside, but in warm-up."""
    even: list[list[int]] = []
    odd: list[list[int]] = []
    for run, lane in zip(runs, lane_of_run, strict=True):
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in run]
        on_border = not any(address % 16 for address in addresses)
        (even if on_border else odd).append([*addresses, run.param.numel(), lane])
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
    language = _kernels().tl
    names = {
        None: "float32",
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
    }
    return {
        "PARAM_DTYPE": getattr(language, names[dtypes.param]),
        "GRAD_DTYPE": getattr(language, names[dtypes.grad]),
        "FIRST_DTYPE": getattr(language, names[dtypes.exp_avg]),
        "SECOND_DTYPE": getattr(language, names[dtypes.exp_avg_sq]),
        "MAIN_DTYPE": getattr(language, names[dtypes.main_param]),
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


def _kernels() -> Any:
    # Late, so that importing graphfsdp.optim needs no Triton.
    from graphfsdp.optim.fused import triton_kernels

    return triton_kernels
