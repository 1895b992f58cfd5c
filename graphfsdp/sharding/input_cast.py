"""Inputs of a unit in the dtype that it computes in."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point inputs of a unit to the dtype that it computes in."""
    if dtype is None:
        return args, kwargs

    def cast(leaf: Any) -> Any:
        castable = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if castable else leaf

    casted: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(cast, (args, kwargs))
    return casted
