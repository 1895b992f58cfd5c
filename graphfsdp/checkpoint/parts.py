"""A rectangular part of a named whole tensor, and fused weights, which are saved in members.

A fused weight holds several matrices one above the other; it is saved as if these were apart, so
that a checkpoint does not depend on whether a model fuses them. A part of it, wherever the border
between two ranks falls, becomes parts of its members; these are views of it, so saving copies
nothing and loading writes in place.
"""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.errors import ConfigError

Box = tuple[slice, ...]


def box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a tensor: its elements, which loading writes, and where they belong."""

    local: Tensor
    offsets: tuple[int, ...]
    whole_shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return box(self.offsets, self.local.shape)

    def like(self, local: Tensor) -> "Part":
        """Return the same part with other elements, which may have another dtype."""
        return Part(local, self.offsets, self.whole_shape)


# Key of a tensor in the checkpoint, and what this rank has of it.
NamedPart = tuple[str, Part]


def whole(tensor: Tensor) -> Part:
    return Part(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


def part_of(tensor: Tensor, offsets: tuple[int, ...] | None = None) -> Part:
    """``offsets`` say where the part of a DTensor begins whose rows are cut unevenly.

    They have as many dims as are cut; None is for a DTensor that is cut as torch does it.
    """
    if not is_dtensor(tensor):
        return whole(tensor)
    shape = tuple(tensor.shape)
    known: Sequence[int] = () if offsets is None else offsets[: len(shape)]
    if offsets is None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        dtensor: Any = tensor
        _, known = compute_local_shape_and_global_offset(
            dtensor.shape, dtensor.device_mesh, dtensor.placements
        )
    return Part(local_part(tensor), (*known, *[0] * (len(shape) - len(known))), shape)


@dataclass(frozen=True)
class FusedWeight:
    """Parameters whose rows belong to several members.

    ``rows`` and ``num_groups`` say which rows are whose. The rows are cut into ``num_groups``
    equal groups, and each group holds ``rows[0]`` shares for the first member, then ``rows[1]``
    for the second, and so on. Shares are relative: ``(1, 1)`` cuts in half, and rows in numbers
    work too.

    Attributes:
        pattern: Names of the parameters, with ``*`` and ``?`` as in a shell. It is compared with
            the full name.
        suffixes: Appended to the name, before a last ``.weight`` or ``.bias`` where there is one.
        rows: Shares of each member.
        num_groups: More than 1 where members alternate, as in Megatron's fused queries, keys and
            values, which alternate for each group of queries.
    """

    pattern: str
    suffixes: tuple[str, ...]
    rows: tuple[int, ...]
    num_groups: int = 1

    def __post_init__(self) -> None:
        if len(self.suffixes) != len(self.rows) or len(set(self.suffixes)) != len(self.suffixes):
            raise ConfigError(
                f"FusedWeight({self.pattern!r}): there must be as many different suffixes as "
                f"rows, got {self.suffixes} and {self.rows}"
            )
        if not self.rows or min(self.rows) < 1 or self.num_groups < 1:
            raise ConfigError(
                f"FusedWeight({self.pattern!r}): rows and num_groups must be positive, got "
                f"{self.rows} and {self.num_groups}"
            )


def swiglu(pattern: str) -> FusedWeight:
    """Gate and up projection of a gated feed-forward layer, saved as ``_w`` and ``_v``."""
    return FusedWeight(pattern, ("_w", "_v"), (1, 1))


def fused_qkv(
    pattern: str, *, num_heads: int, num_query_groups: int | None = None, interleaved: bool = False
) -> FusedWeight:
    """Queries, keys and values in one matrix, saved as ``_q``, ``_k`` and ``_v``.

    Args:
        pattern: Names of the parameters.
        num_heads: Heads of the queries.
        num_query_groups: Heads of the keys, if there are fewer.
        interleaved: They alternate for each group of queries, as in Megatron; else all queries
            come first, then all keys, then all values.
    """
    groups = num_heads if num_query_groups is None else num_query_groups
    if groups < 1 or num_heads % groups:
        raise ConfigError(
            f"fused_qkv({pattern!r}): num_query_groups must divide num_heads={num_heads}, got "
            f"{groups}"
        )
    if interleaved:
        return FusedWeight(pattern, ("_q", "_k", "_v"), (num_heads // groups, 1, 1), groups)
    return FusedWeight(pattern, ("_q", "_k", "_v"), (num_heads, groups, groups))


def gated_delta_net(
    pattern: str, *, key_rows: int, value_rows: int, num_value_heads: int
) -> FusedWeight:
    """Input projection of a gated delta net: query, key, value, z, beta and alpha."""
    return FusedWeight(
        pattern,
        ("_query", "_key", "_value", "_z", "_beta", "_alpha"),
        (key_rows, key_rows, value_rows, value_rows, num_value_heads, num_value_heads),
    )


def gated_delta_net_conv(pattern: str, *, key_rows: int, value_rows: int) -> FusedWeight:
    """Convolution of a gated delta net: query, key and value."""
    return FusedWeight(pattern, ("_query", "_key", "_value"), (key_rows, key_rows, value_rows))


@dataclass(frozen=True)
class Member:
    name: str
    num_rows: int
    runs: tuple[tuple[int, int], ...]  # first row in the fused weight and number of rows, in order

    def parts(self, part: Part) -> Iterator[Part]:
        """Yield what a part of the fused weight holds of this member, as views; maybe nothing."""
        begin = part.offsets[0]
        end = begin + part.local.shape[0]
        shape = (self.num_rows, *part.whole_shape[1:])
        row = 0
        for first, num_rows in self.runs:
            low, high = max(first, begin), min(first + num_rows, end)
            if low < high:
                local = part.local.narrow(0, low - begin, high - low)
                yield Part(local, (row + low - first, *part.offsets[1:]), shape)
            row += num_rows


def members_of(
    name: str, shape: Sequence[int], fused: Sequence[FusedWeight]
) -> tuple[Member, ...] | None:
    """Return the members of a parameter by the first rule that fits; None if it is not fused."""
    rule = next((rule for rule in fused if fnmatch.fnmatchcase(name, rule.pattern)), None)
    if rule is None:
        return None
    shares = sum(rule.rows) * rule.num_groups
    if not shape or shape[0] % shares:
        raise ConfigError(
            f"parameter {name!r} of shape {tuple(shape)} cannot be cut into {rule.suffixes}: its "
            f"rows must be a multiple of {shares}"
            + (f" ({rule.num_groups} groups of {rule.rows})" if rule.num_groups > 1 else "")
            + f". Remedy: another pattern than {rule.pattern!r}, or other rows"
        )
    end = next((end for end in (".weight", ".bias") if name.endswith(end)), "")
    stem = name.removesuffix(end)
    share = shape[0] // shares
    group = shape[0] // rule.num_groups
    starts = [0, *itertools.accumulate(rows * share for rows in rule.rows)]
    return tuple(
        Member(
            f"{stem}{suffix}{end}",
            rows * share * rule.num_groups,
            tuple((start + g * group, rows * share) for g in range(rule.num_groups)),
        )
        for suffix, rows, start in zip(rule.suffixes, rule.rows, starts, strict=False)
    )
