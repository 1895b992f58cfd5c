"""How a view of given geometry is derived from another tensor that looks at the same memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graphfsdp._capture.trace.values import Geometry, Value, span

_ATEN = torch.ops.aten

Emit = Callable[..., Any]  # appends a call of an operator to a graph and returns its result


def derive(base: Any, known: Geometry, wanted: Geometry, emit: Emit) -> Any:
    """Return the view ``wanted`` of the memory that ``base`` looks at as ``known``.

    By slices and permutations where they do, which a compiler follows, else by as_strided.

    Raises:
        ValueError: ``base`` does not hold all of it.
    """
    offset, shape, stride, *_ = wanted
    if known[:3] == (offset, shape, stride):
        return base
    first = offset - known[0]
    if known[3:] != wanted[3:] or first < 0 or first + span(shape, stride) > span(*known[1:3]):
        raise ValueError("a view reaches beyond the tensor that it is taken from")
    num = span(shape, stride)
    if not num:
        return emit(_ATEN.new_empty.default, base, list(shape))
    view = base
    if is_contiguous(known[1], known[2]):
        view = emit(_ATEN.view.default, base, [-1])
        if num != torch.Size(known[1]).numel():
            view = emit(_ATEN.slice.Tensor, view, 0, first, first + num)
    elif first:
        raise ValueError("a view begins inside of a tensor with gaps")
    # What is repeated is taken once, and repeated then.
    cut = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    order = sorted(range(len(cut)), key=lambda dim: (-stride[dim], dim))
    sorted_shape = [cut[dim] for dim in order]
    is_dense = view is not base and is_contiguous(sorted_shape, [stride[dim] for dim in order])
    if not is_dense:
        starts = _box(first, shape, stride, known)
        if starts is not None:  # which may be written into, unlike a look by strides
            for dim, (start, size) in enumerate(zip(starts, shape, strict=True)):
                if size != known[1][dim]:
                    base = emit(_ATEN.slice.Tensor, base, dim, start, start + size)
            return base
        # Without an offset, which would count from where the input's own memory begins.
        return emit(_ATEN.as_strided.default, view, list(shape), list(stride))
    view = emit(_ATEN.view.default, view, sorted_shape)
    if order != sorted(order):
        view = emit(_ATEN.permute.default, view, [order.index(dim) for dim in range(len(order))])
    return view if cut == shape else emit(_ATEN.expand.default, view, list(shape))


def _box(
    first: int, shape: Sequence[int], stride: Sequence[int], known: Geometry
) -> list[int] | None:
    """Return where a view begins in each dimension of a tensor without gaps, if it is cut of it."""
    if tuple(stride) != tuple(known[2]) or not is_contiguous(known[1], known[2]):
        return None
    starts = []
    for size, step, whole in zip(shape, stride, known[1], strict=True):
        start, first = divmod(first, step) if whole > 1 else (0, first)
        if start + size > whole:
            return None
        starts.append(start)
    return None if first else starts


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def regions(values: Iterable[Value]) -> Iterator[tuple[Value, list[Value]]]:
    """Join values that overlap; yield a value that holds all of them, and which these are.

    In the order of first use, so that what is compiled does not depend on addresses.
    """
    by_storage: dict[int, dict[int, Value]] = {}
    first_use: dict[int, int] = {}
    for value in values:
        first_use.setdefault(id(value), len(first_use))
        by_storage.setdefault(id(value.storage), {})[id(value)] = value
    groups: list[list[Value]] = []
    for found in by_storage.values():
        end = -1
        current: list[Value] = []
        for value in sorted(found.values(), key=lambda each: each.geometry[0]):
            offset, shape, stride, *_ = value.geometry
            length = span(shape, stride)
            if not length:
                groups.append([value])
                continue
            if offset >= end:
                current = []
                groups.append(current)
            current.append(value)
            end = max(end, offset + length)
    groups.sort(key=lambda group: min(first_use[id(value)] for value in group))
    for group in groups:
        yield _whole(group), group


def _whole(group: Sequence[Value]) -> Value:
    if len(group) == 1:
        return group[0]
    first = min(value.geometry[0] for value in group)
    stop = max(value.geometry[0] + span(*value.geometry[1:3]) for value in group)
    for value in group:
        offset, shape, stride, *_ = value.geometry
        if offset == first and is_contiguous(shape, stride) and span(shape, stride) == stop - first:
            return value
    return _stretch_of(group[0], first, stop)


def is_part(value: Value, whole: Value) -> bool:
    """Tell whether a value without gaps takes less than half of another one's memory."""
    _, shape, stride, dtype, *_ = value.geometry
    length = span(shape, stride)
    fits = dtype == whole.geometry[3] and is_contiguous(shape, stride)
    return fits and 0 < 2 * length <= span(*whole.geometry[1:3])


def _stretch_of(value: Value, first: int, stop: int) -> Value:
    geometry = (first, (stop - first,), (1,), value.geometry[3], False, False)
    return Value(value.storage, geometry, None)
