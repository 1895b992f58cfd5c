"""Finds layers: stretches of a recording that follow one another and are equal."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphfsdp._capture.trace.values import Node, Value

_FEWEST = 16  # nodes of a layer: what is smaller compiles fast enough, and calls would cost


def layer_borders(nodes: Sequence[Node]) -> set[int]:
    """Return where equal layers begin and end, by index of a node.

    Note [Layers]: cut there, all layers are one compiled function. What crosses the border has to
    be written to memory, which most of it is anyway, for backward.
    """
    numbers: dict[Any, int] = {}
    codes = np.array([numbers.setdefault(_form(node), len(numbers)) for node in nodes])
    borders: set[int] = set()
    taken = np.zeros(len(nodes), dtype=bool)
    for period, start, count in sorted(_repeats(codes), key=lambda each: each[0] * (1 - each[2])):
        stop = start + period * count
        if not taken[start:stop].any():
            taken[start:stop] = True
            borders |= set(range(start, stop + 1, period))
    return borders


def _repeats(codes: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield length and start of a layer, and how often it comes in a row."""
    for period in range(_FEWEST, len(codes) // 2 + 1):
        equal = np.concatenate([[False], codes[:-period] == codes[period:], [False]])
        changes = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(changes[::2], changes[1::2], strict=True):
            if stop - start >= period:
                yield period, int(start), int(stop - start) // period + 1


def _form(item: Any) -> Any:
    """Return what two equal operator calls have in common, hashable."""
    if isinstance(item, Node):
        kwargs = [_form([name, value]) for name, value in item.kwargs.items()]
        return (item.op, _form(item.args), tuple(kwargs), _form(item.outputs))
    if isinstance(item, Value):
        return (item.storage.external, *item.geometry[1:])
    if isinstance(item, Tensor):
        return torch.Tensor
    if isinstance(item, list):
        return tuple(map(_form, item))
    return repr(item)
