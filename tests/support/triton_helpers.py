"""Triton kernels in tests: interpreted on the CPU, and compiled for a GPU that is not here.

A module that launches kernels has them in ``triton_kernels`` beside it, and gets them by
``_kernels()``.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_IS_THERE = importlib.util.find_spec("triton") is not None
if _IS_THERE:
    # Before a test asks for the interpreter: Triton's own functions must not become interpreted.
    import triton.language  # noqa: F401

needs_triton = pytest.mark.skipif(not _IS_THERE, reason="needs triton, which is not installed")


def fresh_kernels(launcher: ModuleType) -> ModuleType:
    """Import its kernels once more: whether to interpret is decided by their decorators."""
    name = f"{launcher.__package__}.triton_kernels"
    kept = sys.modules.pop(name, None)
    try:
        return importlib.import_module(name)
    finally:
        package = sys.modules[str(launcher.__package__)]
        sys.modules.pop(name, None)
        vars(package).pop("triton_kernels", None)
        if kept is not None:
            sys.modules[name] = kept
            vars(package)["triton_kernels"] = kept


def use_interpreter(monkeypatch: pytest.MonkeyPatch, launcher: ModuleType) -> None:
    """Run its kernels in Triton's interpreter until the test ends."""
    import triton.language as tl

    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def largest(values: object, axis: int) -> object:
        return tl.reduce(values, axis, tl.standard._elementwise_max)

    # tl.max is written in Triton itself. To interpret that would leave the functions of tl.core
    # exchanged for good, and no kernel could be compiled any more.
    monkeypatch.setattr(tl, "max", largest)
    kernels = fresh_kernels(launcher)
    monkeypatch.setattr(launcher, "_kernels", lambda: kernels)


def compile_for_sm_90(
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


def resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, as the disassembler tells them."""
    import triton

    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert match is not None, said
    return int(match[1]), int(match[2])
