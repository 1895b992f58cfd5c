"""Tensors: their memory, shape, strides, dtype, and whether they require a gradient."""

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from graphfsdp._capture.guards.places import Ask, Place
from graphfsdp.base.changes import Change, ChangeKind

_PLAIN = (Tensor, nn.Parameter)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_MOVED = (
    "copy new values in place (copy_, fill_, load_state_dict), which replays see, instead of "
    ".to(), .data = ... or load_state_dict(assign=True)"
)


def tensor_places(
    named: Iterable[tuple[str, Tensor]], *, addresses_only: bool = False
) -> Iterator[Place]:
    """Yield what a graph has baked in of tensors.

    Args:
        named: Tensors with their names for messages; a tensor may come several times.
        addresses_only: Their shapes and flags do not matter to a replay.
    """
    unique = {id(tensor): (name, tensor) for name, tensor in reversed(list(named))}
    for name, tensor in reversed(unique.values()):
        yield from _places_of(name, tensor, addresses_only)


def _places_of(name: str, tensor: Tensor, addresses_only: bool) -> Iterator[Place]:
    if type(tensor) in _PLAIN:
        if tensor.layout is torch.strided and not tensor.is_meta:
            yield Place(name, (Tensor.data_ptr, tensor), tensor.data_ptr(), _moved)
            if not addresses_only:
                known = _layout(tensor)
                yield Place(name, (_layout, tensor), known, _layout_changes, cover=_by_torch)
        return
    for attribute, inner in _inner_tensors(tensor):
        what = (getattr, tensor, attribute, None)
        yield Place(name, what, inner, _other_rows, exact=True)
        yield from _places_of(name, inner, addresses_only)
    if not addresses_only:
        required = tensor.requires_grad
        yield Place(name, (_REQUIRES_GRAD, tensor), required, _requires_grad, exact=True)


def _by_torch(tensors: list[Any]) -> Ask:
    """Ask one of torch's own guards for all layouts.

    It objects also to modes that are on or off unlike now (autocast, and those that watch a
    recording); then it is made anew, where replays run.
    """
    guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Ask((operator.call, [partial(guard.check, *tensors)]), [True])


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _inner_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor that wraps others (a DTensor) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor lists its mesh as well
                yield name, inner


def _layout_changes(name: str, before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[Change]:
    fields = zip(("shape", "stride", "dtype"), before, now, strict=False)
    for field, old, new in fields:
        if old != new:
            yield Change(ChangeKind.LAYOUT, name, f"of {field} {old}", f"of {field} {new}", _MOVED)
    if before[-1] != now[-1]:
        yield from _requires_grad(name, before[-1], now[-1])


def _requires_grad(name: str, before: bool, now: bool) -> Iterator[Change]:
    words = {True: "trained (requires_grad=True)", False: "frozen (requires_grad=False)"}
    remedy = f"requires_grad_({before}) again"
    yield Change(ChangeKind.REQUIRES_GRAD, name, words[before], words[now], remedy)


def _other_rows(name: str, old: Tensor, new: Tensor) -> Iterator[Change]:
    yield from _moved(name, old.data_ptr(), new.data_ptr())


def _moved(name: str, old: int, new: int) -> Iterator[Change]:
    words = f"at address {old:#x}", f"in other memory, at {new:#x}"
    yield Change(ChangeKind.ADDRESS, name, *words, _MOVED)
