"""Leaves Python as it was that a capture moves for good: a warm-up trains, and a check does not."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.torch_internals import parameters_of

_Container = dict[Any, Any] | list[Any] | set[Any]


@contextmanager
def untouched(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[list[Tensor]]:
    """Put back what modules, parameters and optimizers hold, and containers of theirs.

    Gradients are taken off meanwhile, and handed out: a capture gives those that were left on other
    memory, and a captured step of these parameters writes them.
    """
    modules = list(model.modules())
    groups = [group for each in optimizers for group in each.param_groups]
    owned = [each for module in modules for each in parameters_of(module).values()]
    owned += [param for group in groups for param in group["params"]]
    params = {id(param): param for param in owned if param is not None}
    tables = [vars(each) for each in (*modules, *optimizers, *params.values())]
    inside = [value for table in tables for value in table.values()]
    held = [each for each in inside if isinstance(each, dict | list | set)]
    kept = [(each, _items(each)) for each in [*tables, *held, *(g["params"] for g in groups)]]
    forms = [(p, p.grad, p.requires_grad, getattr(p, "grad_dtype", None)) for p in params.values()]
    for param in params.values():
        param.grad = None
    try:
        yield [grad for _, grad, *_ in forms if grad is not None]
    finally:
        for param, grad, requires_grad, grad_dtype in forms:
            param.requires_grad_(requires_grad)
            param.grad = grad
            if hasattr(param, "grad_dtype") and param.grad_dtype != grad_dtype:
                param.grad_dtype = grad_dtype
        for container, items in kept:
            _put_back(container, items)


def _items(container: _Container) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _put_back(container: _Container, items: list[Any]) -> None:
    now = _items(container)
    if isinstance(container, dict):
        same = len(now) == len(items) and all(
            a is b for pairs in zip(now, items, strict=True) for a, b in zip(*pairs, strict=True)
        )
    else:
        same = len(now) == len(items) and all(map(operator.is_, now, items))
    if same:  # a class may refuse to be filled, as diffusers' FrozenDict does
        return
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)
