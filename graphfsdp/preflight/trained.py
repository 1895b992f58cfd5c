"""What a script trains: which modules, with which optimizers."""

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.torch_internals import tree_leaves


def trains(module: nn.Module) -> bool:
    """Tell whether a call of a module now is one that trains it."""
    return (
        torch.is_grad_enabled()
        and module.training
        and any(param.requires_grad for param in module.parameters())
    )


def trains_through(args: Any, kwargs: Any) -> bool:
    """Tell whether a call is given what another model has computed, to train that."""
    leaves = tree_leaves((args, kwargs))
    return any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in leaves)


def trained_with(module: nn.Module) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return what may be trained in one iteration with a module: all that optimizers hold.

    Nothing if no optimizer has its parameters.
    """
    gc.collect()  # optimizers that somebody has replaced
    alive = [(each, type(each)) for each in gc.get_objects()]
    optimizers = [each for each, kind in alive if issubclass(kind, torch.optim.Optimizer)]
    inner = {id(getattr(each, "optimizer", None)) for each in optimizers}  # of wrappers
    optimizers = [o for o in optimizers if id(o) not in inner and hasattr(o, "param_groups")]
    held = set(map(id, module.parameters()))
    if all(not params_of(each).keys() & held for each in optimizers):
        return [], []
    modules = [each for each, kind in alive if issubclass(kind, nn.Module)]
    parts = {id(child) for each in modules for child in each.children()}
    roots = [each for each in modules if id(each) not in parts]
    # The one that is called comes first, and the whole before another module made of its parts.
    roots.sort(key=lambda each: -sum(1 for _ in each.modules()))
    roots.sort(key=lambda each: all(part is not module for part in each.modules()))
    return owners_of(roots, optimizers), optimizers


def owners_of(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[nn.Module]:
    """Return the models that have the optimizers' parameters."""
    left = {key for each in optimizers for key in params_of(each)}
    found = []
    for model in models:
        held = set(map(id, model.parameters()))
        if held & left:
            found.append(model)
            left -= held
    return found


def params_of(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return the parameters that an optimizer holds, by id."""
    return {id(param): param for group in optimizer.param_groups for param in group["params"]}
