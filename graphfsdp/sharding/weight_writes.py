"""Who has written weights since when: what was gathered before is old, what is gathered is a copy.

Note [Writes into weights]: a program may write weights anywhere (averages of weights, clipping,
renormalisation). While a unit is at rest its parameters are DTensors over the main weights, and
writing them is right: what was gathered before is gathered again. Inside the unit's forward they
are whole copies, in which a write would be lost; and between a unit's forward and its backward a
write would give gradients of weights that the forward has not seen. Both are errors. Writes
through ``.data`` count nowhere, so nobody can see those.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graphfsdp.errors import PhaseError

Moment = tuple[int, bool]


def moment_of(tensors: Iterable[Tensor]) -> Moment:
    """Return what is another value after each write into one of the tensors.

    Args:
        tensors: Main weights, and the parameters over them: a write through a DTensor counts there
            alone.
    """
    return sum(map(_version, tensors)), torch.is_inference_mode_enabled()


class ForwardWrites:
    """Refuses a forward pass that writes into whole weights."""

    def __init__(self) -> None:
        """No forward pass runs yet."""
        self._whole: list[Tensor] = []
        self._versions: list[int] = []

    def begin(self, whole: Sequence[Tensor | None]) -> None:
        """Note the beginning of a forward pass.

        Args:
            whole: [B] gathered weights; None where a write stays, or where there are none.
        """
        self._whole = [tensor for tensor in whole if tensor is not None]
        self._versions = [_version(tensor) for tensor in self._whole]

    def forget(self) -> None:
        """Forget a forward pass that an exception has ended."""
        self._whole, self._versions = [], []

    @contextmanager
    def ended(self, unit: str) -> Iterator[None]:
        """Let go of the weights, which the body drops, and compare with the beginning after it.

        Args:
            unit: Name of the unit.

        Raises:
            PhaseError: somebody has written into the weights.
        """
        written = [_version(tensor) for tensor in self._whole] != self._versions
        self.forget()  # what holds weights keeps their place in the pool
        yield
        if written:
            raise PhaseError(
                f"the forward pass of unit {_named(unit)} writes into its weights in place. They "
                "are whole there, gathered copies, so the write would be lost. Remedy: write them "
                "where they are sharded, as DTensors: between two iterations, or, for averages of "
                "weights (a momentum encoder), in the forward of a module around the units of "
                "both; compute what a layer only uses (a clipped weight) out of place"
            )


def refuse_other_weights(unit: str, before: Moment, now: Moment) -> None:
    """Refuse a backward pass through weights that its forward has not seen.

    Raises:
        PhaseError: they have been written in between.
    """
    if before[0] != now[0]:
        raise PhaseError(
            f"weights of unit {_named(unit)} were written between its forward and its backward, "
            "which gathers them again: the gradients would be wrong (without fully_shard, autograd "
            "says that they were modified by an inplace operation). Remedy: optimizer.step() and "
            "other writes after the last backward; or clone() what backward needs"
        )


def _named(unit: str) -> str:
    return repr(unit or "(root)")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
