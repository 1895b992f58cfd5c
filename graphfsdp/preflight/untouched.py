"""Leaves a model, its optimizer and every random generator as they were."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.recording import kept_by
from graphfsdp._capture.undo.host_state import save_random_states
from graphfsdp.base.torch_internals import key_of

_Undo = Callable[[], None]
_MAX_DEPTH = 3  # of objects of ours that an optimizer holds


@contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put everything on the host back when the body is over, however it ends.

    That is: which tensors, numbers and containers modules, parameters and the optimizer hold,
    what tensors look at, gradients, ``param_groups``, and the generators of torch, Python and
    NumPy. What is written in memory is somebody else's part (``CopyOnWrite``).
    """
    undo = [
        save_random_states(model, _device_of(model)),
        *(step for module in model.modules() for step in _attributes(module)),
        *_attributes(optimizer, depth=_MAX_DEPTH),
        *_optimizer_tables(optimizer),
        *(step for tensor in _tensors(model, optimizer) for step in _tensor(tensor)),
    ]
    try:
        yield
    finally:
        for step in undo:
            step()


def _attributes(owner: Any, depth: int = 0) -> Iterator[_Undo]:
    yield _container(vars(owner))
    for value in list(vars(owner).values()):
        if isinstance(value, dict | list | set):
            yield _container(value)
        elif (
            depth and type(value).__module__.startswith("graphfsdp.") and hasattr(value, "__dict__")
        ):
            yield from _attributes(value, depth - 1)


def _container(value: Any) -> _Undo:
    # Not value.copy(): a class may refuse to be filled, as diffusers' FrozenDict does.
    kept: Any = dict(value.items()) if isinstance(value, dict) else list(value)

    def restore() -> None:
        if _holds_the_same(value, kept):
            return
        value.clear()
        if isinstance(value, list):
            value.extend(kept)
        else:
            value.update(kept)

    return restore


def _holds_the_same(value: Any, kept: Any) -> bool:
    if len(value) != len(kept):
        return False
    if isinstance(value, dict):
        return all(map(operator.is_, value, kept)) and all(
            map(operator.is_, value.values(), kept.values())
        )
    if isinstance(value, list):
        return all(map(operator.is_, value, kept))
    return set(map(id, value)) == set(map(id, kept))


def _optimizer_tables(optimizer: torch.optim.Optimizer) -> Iterator[_Undo]:
    for group in optimizer.param_groups:
        yield _container(group)
        yield _container(group["params"])
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield _container(state)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [tensor for _, _, tensor in kept_by(model)]
    found = [*model.parameters(), *model.buffers(), *params, *kept]
    return list({id(tensor): tensor for tensor in found}.values())


def _tensor(tensor: Tensor) -> Iterator[_Undo]:
    """Yield what puts back a tensor's attributes, gradient, flags, and the memory it looks at."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    # An alias keeps the memory; `tensor.data = ...` would take the tensor away from it.
    alias = tensor.detach() if plain else None
    restore_attributes, requires_grad = _container(vars(tensor)), tensor.requires_grad
    grad = tensor.grad if tensor.is_leaf else None
    grad_dtype = getattr(tensor, "grad_dtype", None) if tensor.is_leaf else None

    def restore() -> None:
        if alias is not None and not _looks_alike(tensor, alias):
            tensor.data = alias
        restore_attributes()
        if not tensor.is_leaf:
            return
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        tensor.grad = grad
        if hasattr(tensor, "grad_dtype") and tensor.grad_dtype != grad_dtype:
            tensor.grad_dtype = grad_dtype

    yield restore


def _looks_alike(left: Tensor, right: Tensor) -> bool:
    return (
        key_of(left.untyped_storage()) == key_of(right.untyped_storage())
        and left.storage_offset() == right.storage_offset()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))
