"""What other libraries put around a model or an optimizer: taken off, or refused by name."""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from graphfsdp.errors import ConfigError

# Packages whose optimizer wrappers only decide when the inner optimizer steps, which a captured
# step decides by itself. Other wrappers (Lookahead and its like) are optimizers of their own.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def unwrap_optimizer(optimizer: object) -> object:
    """Return the optimizer inside the wrapper of Accelerate or Lightning Fabric.

    Raises:
        ConfigError: the wrapper scales the loss on the host.
    """
    while _is_wrapper(optimizer):
        if getattr(optimizer, "scaler", None) is not None:
            raise ConfigError(
                f"{_name(optimizer)} scales the loss with a GradScaler, which reads on the host "
                "whether a gradient is finite. Remedy: mixed_precision='bf16' or 'no', or "
                "FusedAdam(grad_scaler=graphfsdp.optim.DeviceGradScaler(...)), which scales "
                "inside the graph"
            )
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def refuse_parallel_wrapper(model: nn.Module) -> None:
    """Refuse torch's own data parallelism.

    Raises:
        ConfigError: a module is wrapped in DistributedDataParallel or DataParallel.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            where = f"module {name!r}" if name else "the model"
            raise ConfigError(
                f"{where} is wrapped in {type(module).__name__}, whose collectives are issued by "
                "C++ code that a recording does not see whole. Remedy: leave the wrapper off and "
                "call graphfsdp.fully_shard(model, strategy='no_shard'), which averages the "
                "gradients inside the graph, or stay eager with scope='none'"
            )


def refuse_compiled_modules(model: nn.Module, device: torch.device) -> None:
    """Refuse modules of torch.compile on a CPU, before minutes are spent on compiling them.

    Raises:
        ConfigError: there is one, and the graph would be one of a CPU.
    """
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            where = f"module {name!r}" if name else "the model"
            raise ConfigError(
                f"{where} is compiled by torch.compile; its kernels are invisible to a recording "
                "on a CPU and would be missing from every replay. Remedy: capture the uncompiled "
                "model on a CPU (on CUDA compiled kernels are captured)"
            )


def _is_wrapper(optimizer: object) -> bool:
    package = type(optimizer).__module__.partition(".")[0]
    inner = getattr(optimizer, "optimizer", None)
    return package in _WRAPPERS and isinstance(inner, torch.optim.Optimizer)


def _name(value: object) -> str:
    return f"{type(value).__module__.partition('.')[0]}'s {type(value).__name__}"
