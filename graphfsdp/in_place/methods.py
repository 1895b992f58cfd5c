"""What a loop calls that no mode of torch sees: methods of shards, functions of torch's in C++."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphfsdp.base.sharded import FORWARD_METHOD, ShardedUnit
from graphfsdp.in_place.calls import refusal

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


@contextmanager
def refusing_other_optimizers(
    known: Collection[int], params: Collection[int], is_going_on: Callable[[], bool]
) -> Iterator[None]:
    """Refuse steps of optimizers that a loop was not given, on parameters of its models; by ids.

    No iteration would ever end with one, and what was put off be kept for ever; ``is_going_on``
    tells whether there is one.
    """

    def refuse(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        held = (id(param) for group in optimizer.param_groups for param in group["params"])
        if not is_going_on() or id(optimizer) in known or not any(key in params for key in held):
            return
        raise refusal(
            f"{type(optimizer).__name__} steps weights of a model that is captured in place, and "
            "capture_in_place was not given it",
            "capture_in_place(model, optimizers) with all that step these weights; where the loop "
            "has made a new optimizer, close() and capture_in_place again",
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _below(kind: Any) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
