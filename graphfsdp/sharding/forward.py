"""What a unit does around the forward pass of its modules, and of methods that count as one."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.sharded import FORWARD_METHOD
from graphfsdp.base.torch_internals import not_traced, tree_map
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.module import FSDPModule, shards_of, unit_of


@not_traced
def begin_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a module whole weights, and return its arguments as its policy casts them.

    Those of a root on a GPU are moved there, as by FSDP2.
    """
    shards_of(module)
    unit = unit_of(module)
    unit.enter_forward(module)
    divisor: Any = module.gradient_divide_factor
    assert divisor == unit.group.reduction.divisor
    policy = unit.group.options.policy
    casted: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
    gpu = unit.group.options.mesh.gpu
    if unit.is_root and gpu is not None:
        casted = _moved(casted, gpu)
    if policy.cast_forward_inputs:
        casted = _cast(casted, policy.param_dtype)
    return casted


@not_traced
def end_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unit = unit_of(module)
    unit.leave_forward()
    return _cast(output, unit.group.options.policy.output_dtype)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module compute with whole weights, as ``forward`` does.

    A module that is not sharded stays as it is.

    Args:
        module: What has the method.
        method_name: Its name.

    Raises:
        ConfigError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(
            f"{type(module).__name__} has no method {method_name!r} that could be a forward pass"
        )

    @functools.wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        assert isinstance(module, nn.Module)
        args, kwargs = begin_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            unit_of(module).leave_forward()
            raise
        return end_forward(module, args, output)

    setattr(around, FORWARD_METHOD, True)
    setattr(module, method_name, around)


def _moved(values: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) and leaf.is_cpu else leaf

    return tree_map(move, values)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values

    def cast(leaf: Any) -> Any:
        castable = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if castable else leaf

    return tree_map(cast, values)
