"""Which graph backend a device gets."""

import torch

from graphfsdp._capture.compiled.inductor import require_compiler
from graphfsdp._capture.cpu.graph import CpuGraphBackend
from graphfsdp._capture.cuda.graph import CudaGraphBackend
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp.config import Compile
from graphfsdp.errors import ConfigError


def make_backend(
    name: str,
    device: torch.device,
    compile: Compile = Compile.OFF,  # noqa: A002 (as torch has it)
) -> GraphBackend:
    """Make the backend of a name: "auto", "cuda" or "cpu"."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"unknown backend {name!r}; expected 'auto', 'cuda' or 'cpu'")
    if name == "auto":
        name = device.type
    if name != device.type or name not in ("cuda", "cpu"):
        raise ConfigError(
            f"the {name!r} backend cannot capture a model on {device}; expected a model on one "
            f"'cuda' or 'cpu' device. Remedy: move the model, or leave backend='auto'"
        )
    if name == "cuda":
        if compile is Compile.AUTO:
            raise ConfigError(
                "compile='auto' times pieces of a recording, which there are on a CPU alone. "
                "Remedy: compile=True, and compare with compile=False by graphfsdp bench"
            )
        return CudaGraphBackend(device)
    if compile is not Compile.OFF:
        require_compiler()
    return CpuGraphBackend(device, compile=compile)
