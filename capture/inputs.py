"""Inputs at fixed addresses, into which every batch like the first one is copied."""

import copy
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp._capture.trees import attributes_of, flatten, is_open, opened
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.base.torch_internals import (
    keystr,
    tree_leaves,
    tree_leaves_with_path,
    tree_unflatten,
    without_modes,
)
from graphfsdp.errors import CaptureError, ConfigError, HazardKind

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call
_NUM_STAGES = 2  # batches that may be on their way to the GPU before the host waits
_PLAIN = (tuple, list, dict)


@dataclass(frozen=True)
class TensorLeaf:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLeaf":
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.layout)

    def matches(self, leaf: object) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf.shape == self.shape
            and leaf.dtype == self.dtype
            and leaf.device == self.device
            and leaf.layout == self.layout
        )

    def __str__(self) -> str:
        layout = "" if self.layout is torch.strided else f" of layout {self.layout}"
        return f"a {self.dtype} tensor of shape {tuple(self.shape)} on {self.device}{layout}"


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


class BatchForm:
    """Takes the leaves out of batches that are nested like the first one.

    Most batches are a tensor, or a dict or tuple of some. pytree, which knows many more containers,
    takes as long for them as a small graph for its replay. Only what is nested in exactly these
    types, or in dataclasses, with keys in the same order, is walked here; the rest is left to
    pytree.
    """

    def __init__(self, batch: Any) -> None:
        self._type = type(batch)
        self._is_open = self._type not in _PLAIN
        inside = attributes_of(batch) if self._is_open else batch
        self._keys = list(inside) if isinstance(inside, dict) else None
        values = inside.values() if isinstance(inside, dict) else inside
        # By item; None for one that is a leaf, or a container that only pytree knows.
        self._inner = [
            BatchForm(item) if type(item) in _PLAIN or is_open(item) else None for item in values
        ]

    @classmethod
    def of(cls, batch: Batch, leaves: Sequence[Any]) -> "BatchForm | None":
        """Return the form of a batch, or None where pytree finds other leaves in it."""
        form = cls(batch)
        found: list[Any] = []
        is_alike = form.walk(batch, found) and [*map(id, found)] == [*map(id, leaves)]
        return form if is_alike else None

    def walk(self, batch: Any, found: list[Any]) -> bool:
        """Add the leaves of a batch in pytree's order; False if it is nested otherwise."""
        if type(batch) is not self._type:
            return False
        values = attributes_of(batch) if self._is_open else batch
        if len(values) != len(self._inner):
            return False
        if self._keys is not None:
            if list(values) != self._keys:
                return False
            values = values.values()
        for form, item in zip(self._inner, values, strict=True):
            if form is None:
                found.append(item)
            elif not form.walk(item, found):
                return False
        return True


class _PinnedStages:
    """Page-locked copies of a batch leaf, used in turn.

    CUDA rule: only a copy from page-locked memory is asynchronous, and its source must not be
    written before the copy has run; an event per stage tells when it has. So a leaf that is
    page-locked itself takes the same way: its owner may fill it anew as soon as the call is over.
    """

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self._device = device
        self._stages = [torch.empty_like(like, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_STAGES)]
        self._next = 0

    def copy_to(self, target: Tensor, leaf: Tensor) -> None:
        """Copy a tensor of the host to the device without waiting for the device."""
        index = self._next
        self._next = (index + 1) % _NUM_STAGES
        self._copied[index].synchronize()
        self._stages[index].copy_(leaf)
        target.copy_(self._stages[index], non_blocking=True)
        self._copied[index].record(torch.cuda.current_stream(self._device))


class Handed:
    """A batch as an iteration is given it, to be looked at when that is over.

    Note [The caller's batch]: a graph reads static inputs, so an iteration is given containers that
    are made anew, with static tensors in them. A loop without a graph hands its own in, and sees
    what the iteration puts there. So what it puts into a container, or takes out of one, is refused
    by name, and what it writes into a tensor in place is a further result of the graph, which each
    call copies into the caller's own tensor.
    """

    def __init__(self, batch: Batch) -> None:
        args, kwargs = batch
        self._arguments = {f"args[{index}]": each for index, each in enumerate(args)} | kwargs
        self._before = {name: flatten(each) for name, each in self._arguments.items()}

    def written(self) -> str:
        """Return the name of the first argument that has other contents now, "" for none."""
        for name, argument in self._arguments.items():
            before, form = self._before[name]
            now, form_now = flatten(argument)
            if form_now == form and [*map(id, now)] == [*map(id, before)]:
                continue
            # Some containers make what is in them anew, whenever they are asked for it.
            if [*map(id, flatten(argument)[0])] == [*map(id, now)]:
                return name
        return ""


class StaticInputs:
    """The batch as the graph sees it: same addresses in every iteration.

    A batch of another structure, shape, dtype or device than the first, or with other values that
    are no tensors, is not accepted. One that is accepted is copied in by ``load``, once guards have
    found nothing against it.

    Attributes:
        num_microbatches: Parts that an iteration splits them into.
        given: The leaves of the caller's batch, for what an iteration writes into them; None once
            that is done.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        device: torch.device,
        num_microbatches: int,
    ) -> None:
        """ConfigError if a leaf cannot be a static input or be split."""
        self.num_microbatches = num_microbatches
        leaves, self._spec = flatten((args, kwargs))
        self._form = BatchForm.of((args, kwargs), leaves)
        self._names = _leaf_names((args, kwargs))
        self._leaves: list[TensorLeaf | PlainLeaf] = []
        self._targets: list[tuple[int, Tensor, _PinnedStages | None]] = []
        self._plain: list[int] = []
        self._static = list(leaves)
        for index, (name, leaf) in enumerate(zip(self._names, leaves, strict=True)):
            if not isinstance(leaf, Tensor):
                _check_plain(name, leaf)
                self._leaves.append(PlainLeaf.of(leaf))
                self._plain.append(index)
                continue
            _check_tensor(name, leaf)
            _check_divides(name, leaf, num_microbatches)
            self._leaves.append(TensorLeaf.of(leaf))
            static = torch.empty_like(leaf, device=device, requires_grad=False)
            is_apart = device.type == "cuda" and leaf.device.type == "cpu"
            stages = _PinnedStages(leaf, device) if is_apart else None
            self._targets.append((index, static, stages))
            self._static[index] = static
        self._handed: list[Handed] = []  # by microbatch
        self._versions: list[int] = []
        self.given: list[Any] | None = leaves

    def accept(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int) -> bool:
        """Take a batch that is to be copied in; False if it is not like the first."""
        if num_microbatches != self.num_microbatches:
            return False
        batch = (args, kwargs)
        leaves: list[Any] = []
        form = self._form
        if form is None or not form.walk(batch, leaves) or not self._match(leaves):
            found = self._flatten(batch)
            if found is None or not self._match(found):
                return False
            leaves = found
        self.given = leaves
        return True

    def load(self) -> None:
        """Copy the batch in that was accepted last."""
        assert self.given is not None
        leaves = self.given
        for index in self._plain:
            self._static[index] = leaves[index]
        for index, target, stages in self._targets:
            if target.requires_grad:
                self._let_go()
            leaf = leaves[index]
            if leaf.requires_grad:  # copied, and never linked to the graph
                leaf = leaf.detach()
            # Of a batch that was not compared with the first one, copy_ would broadcast a single
            # row and cast another dtype without a word.
            if stages is None:
                target.copy_(leaf, non_blocking=True)
            else:
                stages.copy_to(target, leaf)

    def hand_out(self, index: int | None = None) -> Batch:
        """Return the arguments, or one microbatch of them, in new containers.

        Tensors are static inputs. The first one begins an iteration.
        """
        if not index:
            self._let_go()
            self._handed.clear()
            self._versions = [target._version for _, target, _ in self._targets]

        def part(leaf: Any) -> Any:
            if index is None or not isinstance(leaf, Tensor) or self.num_microbatches == 1:
                return leaf
            length = leaf.shape[0] // self.num_microbatches
            return leaf.narrow(0, index * length, length)

        batch: Batch = tree_unflatten(list(map(part, self._static)), self._spec)
        self._handed.append(Handed(batch))
        return batch

    def take_writes(self) -> list[int]:
        """Return which leaves the iteration that is over has written in place.

        CaptureError, ConfigError: it has written what no replay can write.
        """
        for name in filter(None, (handed.written() for handed in self._handed)):
            raise _refused_write(name)
        self._handed.clear()
        written = [
            index
            for (index, target, _), version in zip(self._targets, self._versions, strict=True)
            # What comes from another device is a copy in a loop without a graph, too.
            if target._version != version and self._leaves[index] == TensorLeaf.of(target)
        ]
        if written and self.given is not None:
            self._refuse_aliases(written, self.given)
        for index in self._plain:
            _check_plain(self._names[index], self._static[index])
            if not self._leaves[index].matches(self._static[index]):
                raise _refused_write(self._names[index])
        self._let_go()
        return written

    def _refuse_aliases(self, written: Sequence[int], leaves: Sequence[Any]) -> None:
        storages = [storage_key(leaf) if isinstance(leaf, Tensor) else -1 for leaf in leaves]
        for name in [self._names[i] for i in written if storages.count(storages[i]) > 1]:
            raise CaptureError(
                f"the iteration writes into {name}, which is or shares memory with another part of "
                "its batch, and each part is copied in apart. Remedy: pass it once, and take the "
                "other one from it in the iteration",
                kind=HazardKind.STATE,
            )

    def copies_of(self, written: Sequence[int]) -> list[Tensor]:
        return [self._static[index].detach().clone() for index in written]

    def _let_go(self) -> None:
        """Take static inputs out of the autograd graph that an iteration has put them into."""
        for _, target, _ in self._targets:
            if target.requires_grad:
                with without_modes():
                    target.detach_()
                target.grad = None

    def difference(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> str:
        """Say what it is about a batch that is not accepted, and what to do."""
        if num_microbatches != self.num_microbatches:
            return (
                f"the number of microbatches was {self.num_microbatches} and is now "
                f"{num_microbatches}. Remedy: set it back, or on_change='recapture'"
            )
        leaves = self._flatten((args, kwargs))
        if leaves is None:
            return self._other_structure((args, kwargs))
        return next(
            _other_leaf(name, expected, leaf)
            for name, expected, leaf in zip(self._names, self._leaves, leaves, strict=True)
            if not expected.matches(leaf)
        )

    def _flatten(self, batch: Batch) -> list[Any] | None:
        """Return a batch's leaves in the order of the first one's; keys may come in any order."""
        leaves, spec = flatten(batch)
        if spec == self._spec:
            return leaves
        if sorted(_leaf_names(batch)) != sorted(self._names):
            return None
        try:
            return self._spec.flatten_up_to(opened(batch))
        except ValueError:
            return None

    def _match(self, leaves: Sequence[Any]) -> bool:
        for expected, leaf in zip(self._leaves, leaves, strict=True):
            if not expected.matches(leaf):
                return False
        return True

    def _other_structure(self, batch: Batch) -> str:
        names = _leaf_names(batch)
        missing = [f"{name} is missing" for name in self._names if name not in names]
        extra = [f"{name} is new" for name in names if name not in self._names]
        containers = f"the containers differ: expected {self._spec}, got {flatten(batch)[1]}"
        return (
            "the batch has another structure than the one that was captured: "
            f"{', '.join([*missing, *extra]) or containers}. "
            "Remedy: pass every batch with the same arguments, keys and lengths"
        )

    def tensors(self) -> list[Tensor]:
        """Return the static inputs, each once."""
        return [target for _, target, _ in self._targets]

    def describe(self) -> dict[str, str]:
        return dict(zip(self._names, map(str, self._leaves), strict=True))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((self._names[index], target) for index, target, _ in self._targets)

    @property
    def num_bytes(self) -> int:
        return sum(target.nbytes for target in self.tensors())


def _other_leaf(name: str, expected: TensorLeaf | PlainLeaf, leaf: object) -> str:
    got = TensorLeaf.of(leaf) if isinstance(leaf, Tensor) else PlainLeaf(leaf)
    remedy = (
        "pad the batch that differs or drop it (drop_last=True in a "
        "DataLoader), or have a graph for each shape (on_change='recapture')"
    )
    if isinstance(expected, PlainLeaf):
        or_as_tensor = ", or pass it as a tensor" if isinstance(leaf, int | float | complex) else ""
        remedy = (
            "a value that is no tensor is baked into the graph: keep it equal, have a graph for "
            f"each value (on_change='recapture'){or_as_tensor}"
        )
    elif isinstance(got, PlainLeaf):
        how = "torch.from_numpy(array)" if isinstance(leaf, np.ndarray) else "torch.tensor(value)"
        remedy = f"pass a tensor, as before ({how})"
    elif got.layout != expected.layout:
        remedy = f"pass it as the first batch was, {name}.to_dense()"
    elif got.shape == expected.shape:
        remedy = (
            f"pass it as the first batch was, {name}.to({expected.device.type!r}, "
            f"{expected.dtype}), or have a graph for each kind (on_change='recapture')"
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


def _check_divides(name: str, leaf: Tensor, num_microbatches: int) -> None:
    if num_microbatches == 1:
        return
    if leaf.dim() == 0 or leaf.shape[0] % num_microbatches:
        raise ConfigError(
            f"batch leaf {name} ({TensorLeaf.of(leaf)}) cannot be split on dim 0 into "
            f"{num_microbatches} equal microbatches. Remedy: a batch size that "
            f"{num_microbatches} divides, or another number of microbatches"
        )


def _check_plain(name: str, leaf: object) -> None:
    if isinstance(leaf, np.ndarray):
        raise ConfigError(
            f"batch leaf {name} is a numpy array, which a graph would never read again. Remedy: "
            "pass a tensor (torch.from_numpy(array))"
        )
    if not isinstance(leaf, nn.Module) and any(isinstance(v, Tensor) for v in _inside(leaf)):
        raise ConfigError(
            f"batch leaf {name} is a {type(leaf).__name__}, whose tensors cannot be seen: a graph "
            "would go on with those of this batch. Remedy: pass its tensors, in a dict, list, "
            "tuple or dataclass (**batch), and make it of them in the iteration (a BlockMask by "
            "create_block_mask), or register the class with torch.utils._pytree"
        )


def _refused_write(name: str) -> CaptureError:
    return CaptureError(
        f"the iteration writes into {name} of its batch: it puts something into a container, takes "
        "something out (pop), or sets an attribute; a replay runs no Python and writes into "
        "tensors alone. Remedy: write into a container of the iteration's own (batch = "
        "dict(batch)), return what is to be kept beside the loss, or update a tensor of the batch "
        "in place (copy_)",
        kind=HazardKind.STATE,
    )


def _inside(leaf: object) -> Iterator[object]:
    if isinstance(leaf, Mapping):
        yield from leaf.values()
    yield from getattr(leaf, "__dict__", {}).values()
    for slot in getattr(type(leaf), "__slots__", ()):
        yield getattr(leaf, slot, None)


def _leaf_names(batch: Batch) -> list[str]:
    tree = opened(batch)
    try:
        return [_render(path) for path, _ in tree_leaves_with_path(tree)]
    except ValueError:  # of a class that was registered without names for what is in it
        return [f"leaf {index}" for index in range(len(tree_leaves(tree)))]


def _render(path: Sequence[Any]) -> str:
    """Write a path as the caller wrote the argument: args[0]['ids'], mask."""
    which, first, *rest = path
    tail = keystr(tuple(rest))
    if which.idx == 0:
        return f"args[{first.idx}]{tail}"
    return f"{first.key}{tail}"
