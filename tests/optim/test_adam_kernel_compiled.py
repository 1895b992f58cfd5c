"""The Triton kernels, compiled for sm_90 without a GPU."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from adam_kernel_cases import FP32, MIXED, dtype_names, fresh_kernels, needs_triton
from graphfsdp.optim.fused import kernel as step_kernel
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import Dtypes


@needs_triton
@pytest.mark.parametrize("te_math", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [
        FP32,
        MIXED,
        FP32._replace(
            param=torch.bfloat16,
            grad=torch.bfloat16,
            exp_avg=torch.bfloat16,
            exp_avg_sq=torch.bfloat16,
        ),
        MIXED._replace(main_param=torch.int16, max_exp_avg_sq=torch.float32),
        MIXED._replace(
            main_param=torch.int16,
            exp_avg=torch.float8_e4m3fn,
            exp_avg_sq=torch.float16,
            max_exp_avg_sq=torch.float16,
        ),
        FP32._replace(exp_avg=torch.bfloat16, exp_avg_sq=torch.float8_e4m3fn),
    ],
    ids=dtype_names,
)
def test_update_kernel_compiles_for_sm_90(
    dtypes: Dtypes, aligned: bool, te_math: bool, tmp_path: Path
) -> None:
    kernels = fresh_kernels()
    constants = step_kernel.constants(
        dtypes, Flags(te_math=te_math), has_scale=True, has_skip=True, aligned=aligned
    )
    signature = {
        "runs_ptr": "*i64",
        "block_to_run_ptr": "*i32",
        "coefficients_ptr": "*fp32",
        "scale_ptr": "*fp32",
        "skip_ptr": "*fp32",
    }
    compiled = _compile(kernels.update_kernel, signature, constants, step_kernel.NUM_WARPS)
    assert ".target sm_90" in compiled["ptx"]
    assert len(compiled["cubin"]) > 0
    # The point of the unmasked branch: whole 16-byte accesses where the addresses allow them.
    assert (".global.v4.b32" in compiled["ptx"]) is aligned
    # Of 65536 registers, for 20 warps at a time and more, which hide the way to memory.
    if aligned:
        num_registers, num_stack_bytes = _resources(compiled["cubin"], tmp_path)
        assert num_registers <= 65536 // (20 * 32)
        assert num_stack_bytes <= 16


@needs_triton
def test_coefficients_kernel_compiles_for_sm_90_with_float64_maths() -> None:
    kernels = fresh_kernels()
    signature = {"lanes_ptr": "*i64", "hyper_ptr": "*fp64", "coefficients_ptr": "*fp32"}
    constants = {"ADAM_W_MODE": True, "BIAS_CORRECTION": True, "TE_MATH": True, "RULE": "adam"}
    compiled = _compile(kernels.coefficients_kernel, signature, constants, 1)
    assert ".target sm_90" in compiled["ptx"]
    assert "fma.rn.f64" in compiled["ptx"]  # exp2 and log2 are not rounded to float32 on the way
    assert len(compiled["cubin"]) > 0


def _compile(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], num_warps: int
) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )
    return dict(compiled.asm)


def _resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, as the disassembler tells them."""
    import triton

    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert match is not None, said
    return int(match[1]), int(match[2])
