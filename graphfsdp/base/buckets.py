"""Pads batches of any length to few lengths, so that few graphs serve all of them.

Shapes: B = rows of a batch, T = length of a sequence, L = length of its bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.torch_internals import TreeSpec, tree_flatten, tree_unflatten
from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class Buckets:
    """The lengths that batches are padded to.

    A graph has fixed shapes, so each length that occurs costs a capture. With buckets there are
    as many graphs as lengths::

        buckets = graphfsdp.Buckets((64, 128, 256), num_rows=16)
        loader = DataLoader(
            data, batch_size=16, collate_fn=lambda samples: buckets.collate(samples, (0, -100))
        )
        step = graphfsdp.capture(model, optimizer, on_change="recapture")

    Padding must not count in the loss. Fill targets with what the loss ignores (-100 is the
    ``ignore_index`` of torch's cross entropy), or fill a mask with 0 and use ``masked_mean``.

    Attributes:
        lengths: Ascending; the last one is the longest that can be padded.
        num_rows: Rows that every batch is padded to, for a short last batch; None leaves them.
    """

    lengths: tuple[int, ...]
    num_rows: int | None = None

    def __post_init__(self) -> None:
        lengths = tuple(self.lengths)
        sizes = [*lengths, *([] if self.num_rows is None else [self.num_rows])]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
        if not lengths or not whole or list(lengths) != sorted(set(lengths)):
            raise ConfigError(
                "Buckets need ascending positive lengths, and a positive num_rows or None; got "
                f"{lengths} and {self.num_rows}"
            )
        object.__setattr__(self, "lengths", lengths)

    def length_for(self, length: int) -> int:
        """Return the shortest bucket that holds a sequence.

        Raises:
            ConfigError: no bucket is long enough.
        """
        for bucket in self.lengths:
            if length <= bucket:
                return bucket
        raise ConfigError(
            f"a sequence of length {length} fits into no bucket; the longest is "
            f"{self.lengths[-1]}. Remedy: a longer bucket, or cut the sequence"
        )

    def pad(self, batch: Any, fill: Any) -> Any:
        """Pad a batch in dim 1 to its bucket, and in dim 0 to ``num_rows``.

        Args:
            batch: Any nesting of tensors [B, T, ...], all with the same B and T.
            fill: What is put into the padding: a number for all tensors, or a nesting of numbers
                like that of ``batch``.

        Returns:
            The same nesting of tensors [num_rows or B, L, ...].

        Raises:
            ConfigError: a tensor has other sizes, the batch is too long or has too many rows.
        """
        leaves, fills, spec = _flatten(batch, fill)
        if any(leaf.dim() < 2 for leaf in leaves) or len({leaf.shape[:2] for leaf in leaves}) > 1:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ConfigError(f"expected tensors [B, T, ...] with one B and one T, got {shapes}")
        num_rows, length = leaves[0].shape[:2]
        sizes = (self._rows_for(num_rows), self.length_for(length))
        padded = [_fill_up(leaf, sizes, value) for leaf, value in zip(leaves, fills, strict=True)]
        return tree_unflatten(padded, spec)

    def collate(self, samples: Sequence[Any], fill: Any) -> Any:
        """Make a padded batch of sequences of different lengths.

        Args:
            samples: Each any nesting of tensors [T, ...], with its own T.
            fill: As for ``pad``.

        Returns:
            The nesting of one sample, of tensors [num_rows or B, L, ...].

        Raises:
            ConfigError: tensors of one sample differ in length, or a sample is too long, or there
                are too many or none.
        """
        if not samples:
            raise ConfigError("there is no sample to make a batch of")
        flat = [_flatten(sample, fill) for sample in samples]
        for leaves, _, _ in flat:
            if (
                any(leaf.dim() < 1 for leaf in leaves)
                or len({leaf.shape[0] for leaf in leaves}) > 1
            ):
                shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
                raise ConfigError(f"expected tensors [T, ...] with one T per sample, got {shapes}")
        length = self.length_for(max(leaves[0].shape[0] for leaves, _, _ in flat))
        num_rows = self._rows_for(len(samples))
        _, fills, spec = flat[0]
        batch = []
        columns = zip(*(leaves for leaves, _, _ in flat), strict=True)
        for column, value in zip(columns, fills, strict=True):
            rows = torch.stack([_fill_up(leaf, (length,), value) for leaf in column])
            batch.append(_fill_up(rows, (num_rows,), value))
        return tree_unflatten(batch, spec)

    def _rows_for(self, num_rows: int) -> int:
        if self.num_rows is not None and num_rows > self.num_rows:
            raise ConfigError(
                f"a batch of {num_rows} rows does not fit into num_rows={self.num_rows}"
            )
        return num_rows if self.num_rows is None else self.num_rows


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values under a mask, 0 if it is empty.

    Args:
        values: [...] floating point; what is not under the mask may be anything, NaN too.
        mask: [...] boolean, or numbers that are not 0 where a value counts.

    Returns:
        [] of the values' dtype.

    Capture: no host sync.
    """
    counts = mask != 0
    total = torch.where(counts, values, torch.zeros_like(values)).sum()
    return total / counts.sum().clamp(min=1)


def _flatten(batch: Any, fill: Any) -> tuple[list[Tensor], list[float], TreeSpec]:
    leaves, spec = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ConfigError("padding needs tensors, in any nesting, and nothing else")
    if isinstance(fill, int | float):
        return leaves, [fill] * len(leaves), spec
    fills, fill_spec = tree_flatten(fill)
    if fill_spec != spec:
        raise ConfigError(f"fill is nested otherwise than the batch: {fill_spec} and {spec}")
    return leaves, fills, spec


def _fill_up(tensor: Tensor, sizes: Sequence[int], value: float) -> Tensor:
    """Return the tensor with its first dimensions lengthened to ``sizes``."""
    if tuple(tensor.shape[: len(sizes)]) == tuple(sizes):
        return tensor
    padded = tensor.new_full((*sizes, *tensor.shape[len(sizes) :]), value)
    padded[tuple(slice(size) for size in tensor.shape[: len(sizes)])] = tensor
    return padded
