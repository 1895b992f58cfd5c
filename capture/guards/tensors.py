"""Guard of tensors: their memory, shape, strides, dtype, and whether they require a gradient."""

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from graphfsdp._capture.guards.asks import Ask
from graphfsdp.base.changes import Change, ChangeKind

_PLAIN = (Tensor, nn.Parameter)
_MOVED = (
    "copy new values in place (copy_, fill_, load_state_dict), which replays see, instead of "
    ".to(), .data = ... or load_state_dict(assign=True)"
)


class Facts(NamedTuple):
    """What a graph has baked in of one tensor."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class TensorGuard:
    """Notices tensors that moved, were re-shaped, or began or ceased to require a gradient."""

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], *, addresses_only: bool = False
    ) -> None:
        """Remember how the tensors are now.

        Args:
            named: Tensors with their names for messages; a tensor may come several times.
            addresses_only: Their shapes and flags do not matter to a replay.
        """
        unique = {id(tensor): (name, tensor) for name, tensor in reversed(list(named))}
        self._named = list(reversed(unique.values()))
        self._wrappers: list[Tensor] = []
        self._inner: list[tuple[Tensor, str, Tensor]] = []  # wrapper, attribute, what it holds
        self._leaves: list[Tensor] = []  # plain tensors, in the order of their owners
        self._owner_names: list[str] = []
        for name, tensor in self._named:
            self._add_leaves(name, tensor)
        self._facts = [_facts(leaf) for leaf in self._leaves]
        self._requires_grad = [wrapper.requires_grad for wrapper in self._wrappers]
        self._addresses_only = addresses_only

    def asks(self) -> Iterator[Ask]:
        """Yield questions for addresses, and one of torch's own guards for all the rest."""
        yield Ask((Tensor.data_ptr, self._leaves), [facts.address for facts in self._facts])
        if self._inner:
            owners, names, inner = zip(*self._inner, strict=True)
            yield Ask((getattr, owners, names, [None] * len(inner)), list(inner), exact=True)
        if not self._addresses_only:
            if self._wrappers:
                what = (_GET_REQUIRES_GRAD, self._wrappers)
                yield Ask(what, self._requires_grad, exact=True)
            if self._leaves:
                # It objects also to modes that are on or off unlike now (autocast, and those that
                # watch a recording); then it is made anew, where replays run.
                guard = TensorGuards(
                    *self._leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None
                )
                yield Ask((operator.call, [partial(guard.check, *self._leaves)]), [True])

    def changes(self) -> list[Change]:
        """Compare each tensor and name what has changed."""
        found = []
        for owner, name, inner in self._inner:
            if getattr(owner, name) is not inner:
                index = next(i for i, leaf in enumerate(self._leaves) if leaf is inner)
                now = getattr(owner, name).data_ptr()
                found.append(_moved(self._owner_names[index], inner.data_ptr(), now))
        rows = zip(self._owner_names, self._leaves, self._facts, strict=True)
        for name, leaf, before in rows:
            found += _differences(name, before, _facts(leaf), self._addresses_only)
        pairs = zip(self._wrappers, self._requires_grad, strict=True)
        for wrapper, required in pairs:
            if wrapper.requires_grad != required:
                found.append(_requires_grad(self._name_of(wrapper), required))
        return found

    def _add_leaves(self, name: str, tensor: Tensor) -> None:
        if type(tensor) in _PLAIN:
            if _has_address(tensor):
                self._leaves.append(tensor)
                self._owner_names.append(name)
            return
        self._wrappers.append(tensor)
        for attribute, inner in _inner_tensors(tensor):
            self._inner.append((tensor, attribute, inner))
            self._add_leaves(name, inner)

    def _name_of(self, tensor: Tensor) -> str:
        return next((name for name, known in self._named if known is tensor), "an inner tensor")


_GET_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def _facts(tensor: Tensor) -> Facts:
    return Facts(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.requires_grad,
    )


def _has_address(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _inner_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor that wraps others (a DTensor) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor lists its mesh as well
                yield name, inner


def _differences(name: str, before: Facts, now: Facts, addresses_only: bool) -> Iterator[Change]:
    if before.address != now.address:
        yield _moved(name, before.address, now.address)
    if addresses_only:
        return
    for field in ("shape", "stride", "dtype"):
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            yield Change(ChangeKind.LAYOUT, name, f"of {field} {old}", f"of {field} {new}", _MOVED)
    if before.requires_grad != now.requires_grad:
        yield _requires_grad(name, before.requires_grad)


def _requires_grad(name: str, before: bool) -> Change:
    words = {True: "trained (requires_grad=True)", False: "frozen (requires_grad=False)"}
    remedy = f"requires_grad_({before}) again"
    return Change(ChangeKind.REQUIRES_GRAD, name, words[before], words[not before], remedy)


def _moved(name: str, old: int, new: int) -> Change:
    words = f"at address {old:#x}", f"in other memory, at {new:#x}"
    return Change(ChangeKind.ADDRESS, name, *words, _MOVED)
