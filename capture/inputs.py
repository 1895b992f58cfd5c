"""Inputs at fixed addresses, into which every batch is copied."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphfsdp._capture.signature import BatchSignature, PlainLeaf, TensorLeaf, flatten
from graphfsdp.errors import ConfigError

_NUM_STAGES = 2  # batches that may be on their way to the GPU before the host waits


class _PinnedStages:
    """Page-locked copies of a batch leaf, used in turn.

    CUDA rule: only a copy from page-locked memory is asynchronous, and its source must not be
    written before the copy has run; an event per stage tells when it has.
    """

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self._device = device
        self._stages = [torch.empty_like(like, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_STAGES)]
        self._next = 0

    def copy_to(self, target: Tensor, leaf: Tensor) -> None:
        """Copy a pageable tensor to the device without waiting for the device."""
        index = self._next
        self._next = (index + 1) % _NUM_STAGES
        self._copied[index].synchronize()
        self._stages[index].copy_(leaf)
        target.copy_(self._stages[index], non_blocking=True)
        self._copied[index].record(torch.cuda.current_stream(self._device))


class StaticInputs:
    """The batch as the graph sees it: same addresses in every iteration."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        device: torch.device,
        num_microbatches: int,
    ) -> None:
        """ConfigError if a leaf cannot be a static input or be split."""
        leaves, spec = flatten(args, kwargs)
        self._signature = BatchSignature(leaves, spec)
        self._targets: list[tuple[int, Tensor, _PinnedStages | None]] = []
        static = list(leaves)
        for index, name in enumerate(self._signature.names):
            if isinstance(self._signature.leaves[index], PlainLeaf):
                continue
            leaf: Tensor = leaves[index]
            _check_divides(name, leaf, num_microbatches)
            static[index] = torch.empty_like(leaf, device=device, requires_grad=False)
            pageable = device.type == "cuda" and leaf.device.type == "cpu" and not leaf.is_pinned()
            stages = _PinnedStages(leaf, device) if pageable else None
            self._targets.append((index, static[index], stages))
        self.args, self.kwargs = pytree.tree_unflatten(static, spec)
        self._copy(leaves)

    def load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy a batch in; BatchMismatchError, and nothing copied, if it is not like the first."""
        # copy_ would broadcast a batch of 1 and cast another dtype without a word.
        self._copy(self._signature.match(args, kwargs))

    def accept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves = self._signature.accept(args, kwargs)
        if leaves is None:
            return False
        self._copy(leaves)
        return True

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return self._signature.difference(args, kwargs)

    def _copy(self, leaves: list[Any]) -> None:
        with torch.no_grad():
            for index, target, stages in self._targets:
                if stages is None:
                    target.copy_(leaves[index], non_blocking=True)
                else:
                    stages.copy_to(target, leaves[index])

    def tensors(self) -> list[Tensor]:
        """Return the static inputs, each once."""
        return [target for _, target, _ in self._targets]

    def describe(self) -> dict[str, str]:
        pairs = zip(self._signature.names, self._signature.leaves, strict=True)
        return {name: str(leaf) for name, leaf in pairs}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((self._signature.names[index], target) for index, target, _ in self._targets)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t, _ in self._targets)


def _check_divides(name: str, leaf: Tensor, num_microbatches: int) -> None:
    if num_microbatches == 1:
        return
    if leaf.dim() == 0 or leaf.shape[0] % num_microbatches:
        raise ConfigError(
            f"batch leaf {name} ({TensorLeaf.of(leaf)}) cannot be split on dim 0 into "
            f"{num_microbatches} equal microbatches. Remedy: a batch size that "
            f"{num_microbatches} divides, or another number of microbatches"
        )
