"""Sums that a GPU adds up by atomics: in another order each time they run.

While ``torch.use_deterministic_algorithms`` is off, so that an iteration differs from itself in
last bits, in eager mode and in replays alike, as on a GPU.
"""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Of their own: tests and programs seed torch's and Python's.
_ORDERS = random.SystemRandom()


def _order(length: int) -> Tensor:
    return torch.tensor(_ORDERS.sample(range(length), length), dtype=torch.long)


def _index_add(
    target: Tensor, dim: int, index: Tensor, source: Tensor, *rest: Any
) -> tuple[Any, ...]:
    if index.dim() != 1 or source.dim() == 0:
        return target, dim, index, source, *rest
    order = _order(len(index))
    return target, dim, index[order], source.index_select(dim, order), *rest


def _scatter_add(
    target: Tensor, dim: int, index: Tensor, source: Tensor, *rest: Any
) -> tuple[Any, ...]:
    if index.dim() == 0:
        return target, dim, index, source, *rest
    for axis, size in enumerate(index.shape):
        source = source.narrow(axis, 0, size)
    order = _order(index.shape[dim])
    return target, dim, index.index_select(dim, order), source.index_select(dim, order), *rest


_REORDERED: Mapping[str, Callable[..., tuple[Any, ...]]] = MappingProxyType(
    {
        **{f"aten::{name}": _index_add for name in ("index_add", "index_add_")},
        **{f"aten::{name}": _scatter_add for name in ("scatter_add", "scatter_add_")},
    }
)
_NUDGED = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_efficient_attention_backward",
    }
)


def order_of(schema_name: str) -> Callable[..., tuple[Any, ...]] | None:
    """Return what puts an operator's arguments into another order; None if sums have one."""
    if torch.are_deterministic_algorithms_enabled():
        return None
    return _REORDERED.get(schema_name)


def is_nudged(schema_name: str) -> bool:
    """Whether results of an operator come out a last bit up or down."""
    return schema_name in _NUDGED and not torch.are_deterministic_algorithms_enabled()


def nudge(result: Tensor) -> Tensor:
    """Return a result whose elements are, each by chance, the next number up, or as they were."""
    if not result.is_floating_point() or not result.numel():
        return result
    chosen = torch.tensor(_ORDERS.choices((False, True), k=result.numel())).view(result.shape)
    return torch.where(chosen, torch.nextafter(result, torch.full_like(result, torch.inf)), result)
