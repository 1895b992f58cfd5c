"""What a loop calls that no mode of torch sees: methods of shards, functions of torch's in C++."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from graphfsdp.base.sharded import FORWARD_METHOD, ShardedUnit

_OF_TENSORS = ("full_tensor", "redistribute", "to_local")
_OF_MODULES = ("reshard", "unshard")


def forward_methods(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return those that ``register_fsdp_forward_method`` was called for, by name."""
    return {name: value for name, value in vars(module).items() if hasattr(value, FORWARD_METHOD)}


def methods_of_shards(
    units: Sequence[ShardedUnit],
) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield classes with names and methods that a loop may call between model and step."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None:
        for kind in (tensors.DTensor, *_below(tensors.DTensor)):
            yield from (
                (kind, name, vars(kind)[name]) for name in _OF_TENSORS if name in vars(kind)
            )
    if units:
        from graphfsdp.sharding.module import FSDPModule

        yield from ((FSDPModule, name, vars(FSDPModule)[name]) for name in _OF_MODULES)


def handle_for(module: nn.Module, async_op: bool = False) -> object:
    """Return what ``unshard`` and ``reshard`` return."""
    if not async_op:
        return None
    from graphfsdp.sharding.module import UnshardHandle

    return UnshardHandle()


@contextmanager
def grouped_where_they_will_be(device: torch.device) -> Iterator[None]:
    """Have torch's clipping, however it was imported, choose kernels for where gradients will be.

    Those that are not there yet are on the device "meta"; see Note [No memory] in ``region.py``.
    """
    group: Any = vars(clip_grad)["_group_tensors_by_device_and_dtype"]

    def grouped(*args: Any, **kwargs: Any) -> Any:
        found = group(*args, **kwargs)
        return {
            (device if where.type == "meta" else where, dtype): tensors
            for (where, dtype), tensors in found.items()
        }

    vars(clip_grad)[group.__name__] = grouped
    try:
        yield
    finally:
        vars(clip_grad)[group.__name__] = group


def _below(kind: Any) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
