"""Nested containers: what torch's pytree knows, and dataclasses that hold tensors.

``torch.utils._pytree.register_dataclass`` would change a user's class for the whole process, and
fail where the user registers it, too. So instances lie in a container of our own meanwhile.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import GetAttrKey, register_pytree_node

from graphfsdp.base.torch_internals import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return leaves and nesting, of which ``tree_unflatten`` makes dataclasses again."""
    return tree_flatten(opened(tree))


def copied(tree: Any) -> Any:
    """Return a tree whose containers and tensors are others, of the same contents."""
    leaves, spec = flatten(tree)
    return tree_unflatten(
        [each.clone() if isinstance(each, Tensor) else each for each in leaves], spec
    )


def is_open(value: Any) -> bool:
    """Tell whether a leaf of pytree's is an instance of a dataclass with tensors in it."""
    return _holds_tensors(value, set())


def attributes_of(instance: Any) -> dict[str, Any]:
    """Return what an instance of a dataclass holds, but for what it has cached."""
    cls = type(instance)
    names = [field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name)]
    names += [
        name
        for name in getattr(instance, "__dict__", ())
        if not isinstance(getattr(cls, name, None), functools.cached_property)
    ]
    return {name: getattr(instance, name) for name in names}


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)
    if not is_instance or id(value) in seen:
        return False
    seen.add(id(value))
    leaves = tree_leaves(list(attributes_of(value).values()))
    return any(isinstance(leaf, Tensor) or _holds_tensors(leaf, seen) for leaf in leaves)


class _Opened:
    """Stands for an instance of a dataclass in a tree."""

    def __init__(self, instance: Any) -> None:
        attributes = attributes_of(instance)
        self.form = type(instance), tuple(attributes)
        self.values = list(map(opened, attributes.values()))


def opened(tree: Any) -> Any:
    """Return a tree that pytree sees through."""
    if not any(map(is_open, tree_leaves(tree))):
        return tree
    return tree_map(lambda leaf: _Opened(leaf) if is_open(leaf) else leaf, tree)


def _closed(values: Iterable[Any], form: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = form
    made: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # it may be frozen
    return made


register_pytree_node(
    _Opened,
    lambda node: (node.values, node.form),
    _closed,
    flatten_with_keys_fn=lambda node: (
        [(GetAttrKey(n), value) for n, value in zip(node.form[1], node.values, strict=True)],
        node.form,
    ),
)
