"""The whole state of a training program by name, and the first tensor in which two differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.undo.random_state import generators_of
from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.dtensors import local_part


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in two runs.

    Attributes:
        name: What it is.
        num_unequal: Elements that differ.
        numel: Elements that it has.
        max_difference: Largest absolute difference; NaN where only one side is NaN, or absent.
    """

    name: str
    num_unequal: int
    numel: int
    max_difference: float

    def __str__(self) -> str:
        size = "a NaN" if math.isnan(self.max_difference) else f"up to {self.max_difference:.3g}"
        return f"{self.name} differs in {self.num_unequal} of {self.numel} elements, by {size}"


def copy_state(
    model: nn.Module,
    optimizer: CapturableOptimizer,
    gradients: PersistentGradients,
    results: Sequence[Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return copies of results, gradients, buffers, optimizer state, parameters and generators.

    In the order in which an iteration computes them, so that the first that differs is the one
    nearest to the cause.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for index, result in enumerate(results):
            yield f"result {index}", result
        for name, view in gradients.named_views():
            yield f"the gradient of {name!r}", view
        for name, buffer in model.named_buffers():
            yield f"buffer {name!r}", buffer
        for path, module in model.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f"attribute {f'{path}.{key}'.lstrip('.')!r}", value
        for name, state in optimizer.state_tensors():
            yield f"optimizer state, {name}", state
        for name, param in model.named_parameters():
            yield f"parameter {name!r}", param
        for index, generator in enumerate(generators_of(model, device)):
            yield f"the state of generator {index} on {generator.device}", generator.get_state()

    return {name: local_part(tensor).detach().clone() for name, tensor in tensors()}


def first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Difference | None:
    """Compare bit for bit, NaN being equal to NaN.

    Returns:
        The first tensor that differs, or is on one side only; None if there is none.
    """
    for name in (*left, *(name for name in right if name not in left)):
        one, other = left.get(name), right.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            numel = (one if one is not None else right[name]).numel()
            return Difference(name, numel, numel, math.nan)
        unequal = _unequal(one, other)
        if unequal.any():
            gap = (_wide(one)[unequal] - _wide(other)[unequal]).abs().max()
            return Difference(name, int(unequal.sum()), one.numel(), float(gap))
    return None


def _unequal(left: Tensor, right: Tensor) -> Tensor:
    bits = [t.contiguous().reshape(*t.shape, 1).view(torch.uint8) for t in (left, right)]
    unequal = (bits[0] != bits[1]).any(dim=-1)
    if left.is_floating_point() or left.is_complex():
        unequal &= ~(_wide(left).isnan() & _wide(right).isnan())
    return unequal


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
