"""A weight that is only there as 8-bit numbers with scales, and looks like any other tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.torch_internals import schema_of
from graphfsdp.config import GatherFormat
from graphfsdp.eight_bit.formats import from_float8, from_mxfp8
from graphfsdp.errors import PhaseError

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class EightBitWeight(Tensor):
    """A matrix [N, K] of some dtype, of which ``numbers`` and ``scale`` are all that is kept.

    A layer that multiplies in 8 bits takes those; every other operator gets what they stand for,
    made anew each time. ``scale``: as ``formats`` has it, of rows [N, 1], of blocks [N, K / 32].
    """

    numbers: Tensor
    scale: Tensor
    format: GatherFormat

    @staticmethod
    def __new__(
        cls, numbers: Tensor, scale: Tensor, number_format: GatherFormat, dtype: torch.dtype
    ) -> "EightBitWeight":
        make: Any = Tensor._make_wrapper_subclass
        made: EightBitWeight = make(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.scale, made.format = numbers, scale, number_format
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _SAME:
            weight = args[0]
            return cls(weight.numbers, weight.scale, weight.format, weight.dtype)
        if schema_of(func).is_mutable:
            raise PhaseError(
                f"{func} writes into a weight that was gathered in 8 bits, where the write would "
                "be lost. Remedy: write it where it is sharded, between two iterations"
            )
        return func(*map(_in_full, args), **{k: _in_full(v) for k, v in (kwargs or {}).items()})

    def in_full(self) -> Tensor:
        """Return what the numbers stand for. Capture: two to six operators."""
        read = from_mxfp8 if self.format is GatherFormat.MXFP8 else from_float8
        return read(self.numbers, self.scale, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[GatherFormat, torch.dtype]]:
        return ["numbers", "scale"], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor],
        context: tuple[GatherFormat, torch.dtype],
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> "EightBitWeight":
        return EightBitWeight(parts["numbers"], parts["scale"], *context)


def _in_full(value: Any) -> Any:
    if isinstance(value, EightBitWeight):
        return value.in_full()
    return [_in_full(each) for each in value] if isinstance(value, list | tuple) else value
