"""Which functions set the values of a module, and calling them so that nothing else changes."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def in_init_order(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yield full name, module, and the modules around it from the root on; children first.

    So constructors run, and ``nn.Module.apply``: random numbers are drawn in the same order.
    """
    return _below(model, "", (), set())


def _below(
    module: nn.Module, name: str, around: tuple[nn.Module, ...], seen: set[int]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    seen.add(id(module))
    for child_name, child in module.named_children():
        if id(child) not in seen:
            full_name = f"{name}.{child_name}" if name else child_name
            yield from _below(child, full_name, (*around, module), seen)
    yield name, module, around


def sets_values_of(module: nn.Module, around: Sequence[nn.Module]) -> nn.Module:
    """Return the module whose initialisation sets what a module holds: lists have none."""
    if isinstance(module, _CONTAINERS) and around:
        return sets_values_of(around[-1], around[:-1])
    return module


def own_initializer(module: nn.Module) -> Callable[[], object] | None:
    """Return what sets a module's values when it is constructed, None if it has no such method."""
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if _takes(own):
            return cast("Callable[[], object]", own)
    return None


def model_initializer(
    module: nn.Module,
    around: Sequence[nn.Module],
    init: Callable[[nn.Module], object] | None,
) -> Callable[[], object] | None:
    """Return what sets a module's values after it is constructed, None if there is nothing.

    Args:
        module: What to set.
        around: The modules around it, from the root on.
        init: Given by the user, in the place of the model's ``_init_weights``.
    """
    if init is not None:
        return functools.partial(init, module)
    for owner in (module, *reversed(around)):
        of_model: Any = getattr(owner, "_init_weights", None)
        if _takes(of_model, module):
            return functools.partial(of_model, module)
    return None


def _takes(function: Any, *args: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


@contextmanager
def keeping(module: nn.Module, kept: Set[int]) -> Iterator[None]:
    """Put back what the body changes of some tensors in a module and below: objects and values.

    Args:
        module: Its parameters and buffers.
        kept: Ids of the tensors.
    """
    before: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (place, name, tensor, _local(tensor).clone())
        for below in module.modules()
        for place in (cast("dict[str, Any]", below._parameters), below._buffers)
        for name, tensor in place.items()
        if tensor is not None and id(tensor) in kept
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, name, tensor, values in before:
                _local(tensor).copy_(values)
                place[name] = tensor


def _local(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, or of this rank's part of a DTensor."""
    part: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part.detach()
