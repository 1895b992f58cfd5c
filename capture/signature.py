"""What a batch must look like for a graph: structure, shapes, dtypes, devices, plain values."""

import copy
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphfsdp.errors import BatchMismatchError, ConfigError


@dataclass(frozen=True)
class TensorLeaf:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLeaf":
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def matches(self, leaf: object) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf.shape == self.shape
            and leaf.dtype == self.dtype
            and leaf.device == self.device
        )

    def __str__(self) -> str:
        return f"a {self.dtype} tensor of shape {tuple(self.shape)} on {self.device}"


@dataclass(frozen=True)
class PlainLeaf:
    """A value of a batch that is no tensor: the graph has it baked in."""

    value: Any

    @classmethod
    def of(cls, value: Any) -> "PlainLeaf":
        """Return a leaf that goes on being what the value is now, should it change in place."""
        try:
            kept = cls(copy.deepcopy(value))
        except Exception:
            return cls(value)
        # What is not equal to its copy can only be told by being the same object.
        return kept if kept.matches(value) else cls(value)

    def matches(self, leaf: object) -> bool:
        if leaf is self.value:
            return True
        if type(leaf) is not type(self.value):
            return False
        try:
            return bool(leaf == self.value)
        except (TypeError, ValueError, RuntimeError):
            return False

    def __str__(self) -> str:
        return f"{reprlib.repr(self.value)} ({type(self.value).__name__})"


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten((args, kwargs))


class BatchForm:
    """Takes the leaves out of batches that are nested like the first one.

    Most batches are a tensor, or a dict or tuple of some. pytree, which knows many more containers,
    takes as long for them as a small graph for its replay. Only what is nested in exactly these
    types, with keys in the same order, is walked here; ``leaves`` leaves the rest to pytree.
    """

    def __init__(self, batch: object) -> None:
        self._type = type(batch)
        self._keys: list[Any] | None = None
        self._inner: list[BatchForm] | None = None
        if isinstance(batch, dict):
            self._keys = list(batch)
            self._inner = [BatchForm(value) for value in batch.values()]
        elif isinstance(batch, tuple | list):
            self._inner = [BatchForm(value) for value in batch]

    @classmethod
    def of(cls, batch: object, leaves: Sequence[Any]) -> "BatchForm | None":
        """Return the form of a batch, or None where pytree finds other leaves in it."""
        form = cls(batch)
        found = form.leaves(batch) if form._is_plain() else None
        return form if found is not None and [*map(id, found)] == [*map(id, leaves)] else None

    def leaves(self, batch: object) -> list[Any] | None:
        """Return the leaves of a batch in pytree's order, or None if it is nested otherwise."""
        found: list[Any] = []
        return found if self._walk(batch, found) else None

    def _is_plain(self) -> bool:
        if self._inner is None:
            return True
        return self._type in (tuple, list, dict) and all(form._is_plain() for form in self._inner)

    def _walk(self, batch: Any, found: list[Any]) -> bool:
        if self._inner is None:
            found.append(batch)
            return True
        kind: type[Any] = type(batch)
        if kind is not self._type or len(batch) != len(self._inner):
            return False
        values: Iterable[Any] = batch
        if self._keys is not None:
            if list(batch) != self._keys:
                return False
            values = batch.values()
        return all(form._walk(each, found) for form, each in zip(self._inner, values, strict=True))


class BatchSignature:
    """Metadata of every leaf of the batch that a graph was made for."""

    def __init__(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        """ConfigError if a leaf cannot be a static input."""
        self._spec = spec
        self._form = BatchForm.of(pytree.tree_unflatten(list(leaves), spec), leaves)
        self.names = _leaf_names(leaves, spec)
        self.leaves: list[TensorLeaf | PlainLeaf] = []
        for name, leaf in zip(self.names, leaves, strict=True):
            if isinstance(leaf, Tensor):
                _check_tensor(name, leaf)
                self.leaves.append(TensorLeaf.of(leaf))
            else:
                _check_plain(name, leaf)
                self.leaves.append(PlainLeaf.of(leaf))

    def accept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return a batch's leaves in the order of the signature, or None if it differs.

        Keys may come in any order.
        """
        plain = self._form.leaves((args, kwargs)) if self._form is not None else None
        if plain is not None and self._match(plain):
            return plain
        leaves, spec = flatten(args, kwargs)
        if spec != self._spec:
            if sorted(_leaf_names(leaves, spec)) != sorted(self.names):
                return None
            try:
                leaves = self._spec.flatten_up_to((args, kwargs))
            except ValueError:
                return None
        return leaves if self._match(leaves) else None

    def _match(self, leaves: Sequence[Any]) -> bool:
        pairs = zip(self.leaves, leaves, strict=True)
        return all(expected.matches(leaf) for expected, leaf in pairs)

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        leaves, spec = flatten(args, kwargs)
        if spec != self._spec:
            names = _leaf_names(leaves, spec)
            if sorted(names) != sorted(self.names):
                return self._other_structure(names, spec)
            try:
                leaves = self._spec.flatten_up_to((args, kwargs))
            except ValueError:
                return self._other_structure(names, spec)
        pairs = zip(self.names, self.leaves, leaves, strict=True)
        return next(
            _other_leaf(name, expected, leaf)
            for name, expected, leaf in pairs
            if not expected.matches(leaf)
        )

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """As ``accept``, but BatchMismatchError names the first leaf that differs."""
        leaves = self.accept(args, kwargs)
        if leaves is None:
            raise BatchMismatchError(self.difference(args, kwargs))
        return leaves

    def _other_structure(self, names: Sequence[str], spec: pytree.TreeSpec) -> str:
        missing = [name for name in self.names if name not in names]
        extra = [name for name in names if name not in self.names]
        parts = [
            *(f"{name} is missing" for name in missing),
            *(f"{name} is new" for name in extra),
        ]
        what = ", ".join(parts) or f"the containers differ: expected {self._spec}, got {spec}"
        return (
            f"the batch has another structure than the one that was captured: {what}. "
            "Remedy: pass every batch with the same arguments, keys and lengths"
        )


def _other_leaf(name: str, expected: TensorLeaf | PlainLeaf, leaf: object) -> str:
    got = TensorLeaf.of(leaf) if isinstance(leaf, Tensor) else PlainLeaf(leaf)
    remedy = (
        "pad the batch that differs (graphfsdp.Buckets) or drop it (drop_last=True in a "
        "DataLoader), or have a graph for each shape (on_change='recapture')"
        if isinstance(expected, TensorLeaf)
        else "a value that is no tensor is baked into the graph: keep it equal, or pass it as a "
        "tensor"
    )
    return f"batch leaf {name}: expected {expected}, got {got}. Remedy: {remedy}"


def _check_tensor(name: str, leaf: Tensor) -> None:
    if leaf.layout is not torch.strided or type(leaf) not in (Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"batch leaf {name} is a {type(leaf).__name__} of layout {leaf.layout}; a static "
            "input must be a plain strided tensor. Remedy: pass its dense parts"
        )
    if leaf.requires_grad:
        raise ConfigError(
            f"batch leaf {name} requires a gradient, which would be left in a copy that you "
            "never see. Remedy: detach it, or make it a parameter"
        )


def _check_plain(name: str, leaf: object) -> None:
    if isinstance(leaf, np.ndarray):
        raise ConfigError(
            f"batch leaf {name} is a numpy array, which a graph would never read again. Remedy: "
            "pass a tensor (torch.as_tensor)"
        )
    if not isinstance(leaf, nn.Module) and any(isinstance(v, Tensor) for v in _inside(leaf)):
        raise ConfigError(
            f"batch leaf {name} is a {type(leaf).__name__}, whose tensors cannot be seen: a graph "
            "would go on with those of this batch. Remedy: pass its tensors, in a dict, list or "
            "tuple (**batch), or register the class with torch.utils._pytree"
        )


def _inside(leaf: object) -> Iterator[object]:
    if isinstance(leaf, Mapping):
        yield from leaf.values()
    yield from getattr(leaf, "__dict__", {}).values()
    for slot in getattr(type(leaf), "__slots__", ()):
        yield getattr(leaf, slot, None)


def _leaf_names(leaves: Sequence[Any], spec: pytree.TreeSpec) -> list[str]:
    tree = pytree.tree_unflatten(list(leaves), spec)
    return [_render(path) for path, _ in pytree.tree_leaves_with_path(tree)]


def _render(path: Sequence[Any]) -> str:
    """Write a path as the caller wrote the argument: args[0]['ids'], mask."""
    which, first, *rest = path
    tail = pytree.keystr(tuple(rest))
    if which.idx == 0:
        return f"args[{first.idx}]{tail}"
    return f"{first.key}{tail}"
