"""How tensors look from outside, and tensors that stand for others until these are there."""

import copy
import copyreg
from dataclasses import dataclass

import torch
from torch import Tensor

from graphfsdp.base.dtensors import Wrapping
from graphfsdp.base.op_tensors import in_same_memory, is_wrapper_subclass

# What tells of a tensor's form and not of its numbers: answered by the tensor that stands for it.
OF_FORM = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__),
        *(Tensor.element_size, Tensor.__hash__, Tensor.is_signed),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "itemsize"),
                *("is_sparse", "is_nested", "is_quantized", "nbytes"),
            )
        ),
    }
)
# What tells of its device, which is not that of the tensor that stands for it.
OF_PLACE = frozenset(
    {
        Tensor.get_device,
        *(getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")),
    }
)


@dataclass(frozen=True)
class Form:
    """A tensor to be, as it looks from outside; see Note [No memory] in ``region.py``.

    ``wrapping`` and ``inside`` are of one that wraps others (a DTensor).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    wrapping: Wrapping | None = None
    inside: "tuple[Form, ...]" = ()

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        stride = tensor.stride() if tensor.layout is torch.strided else ()
        wrapping, inside = Wrapping.take_apart(tensor)
        return cls(
            *(tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad),
            wrapping,
            () if wrapping is None else tuple(map(cls.of, inside)),
        )

    def empty(self) -> Tensor:
        if self.wrapping is not None:
            return self.wrapping.around(form.empty() for form in self.inside)
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_() if self.requires_grad else made


def another_of(tensor: Tensor) -> Tensor:
    """Return another tensor in its memory, as ``in_same_memory``, and of what it wraps likewise."""
    wrapping, inside = Wrapping.take_apart(tensor)
    return in_same_memory(tensor) if wrapping is None else wrapping.around(map(another_of, inside))


def become(tensor: Tensor, other: Tensor) -> None:
    """Make a tensor, which others hold, what another one is, which nobody uses any more."""
    kind = type(other)
    if is_wrapper_subclass(kind):
        tensor.__class__ = kind
        vars(tensor).update(vars(other))
        for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]
            if hasattr(other, name):
                setattr(tensor, name, getattr(other, name))
    torch._C._swap_tensor_impl(tensor, other)


def copied(tensor: Tensor) -> Tensor:
    """Return what ``copy.deepcopy`` does, made by operators alone."""
    if not tensor.is_leaf:
        return copy.deepcopy(tensor)  # which says what torch has against it
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
