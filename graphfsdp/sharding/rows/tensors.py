"""What ``model.parameters()`` shows of a sharded unit: DTensors that handle operators themselves.

torch's DTensor takes for granted that ``torch.chunk`` has cut a tensor. So nothing here is asked of
it for a tensor that is cut otherwise: what an operator does says operators.py, or refuses it.

Note [Who asks a RowTensor]: from 2.13 on torch leaves operators to children of its DTensor. Before,
it runs them itself, as if ``torch.chunk`` had cut the rows. So there each function of torch's that
is called with a RowTensor runs inside of a mode, which is asked first. A backward pass is out of
its reach: gradients of what functions make of a RowTensor are refused there, but for those of
``full_tensor``, ``to_local`` and ``redistribute``.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

from graphfsdp.base.op_tensors import flat_tensors
from graphfsdp.base.torch_internals import (
    ASKS_SUBCLASSES,
    OpOverload,
    TorchDispatchMode,
    known_spec,
    local_tensor_of,
)
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.placement import my_rows, whole_of, without_rows, wrap_rows
from graphfsdp.sharding.rows.operators import run

# On a tensor: the hook that keeps its gradient cut by rows.
_KEEPS_ROWS = "_graphfsdp_keeps_rows"


class RowTensor(DTensor):
    """A DTensor whose rows are cut as a ``RowShard`` says, evenly or not."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, tuple(args), dict(kwargs or {}))

    if not ASKS_SUBCLASSES:

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            # With functions of children off, as for torch's DTensors.
            call = functools.partial(super().__torch_function__, func, types, args, kwargs or {})
            if _only_asks(func):
                return call()
            with _RowsFirst():  # type: ignore[no-untyped-call]
                result = call()
            for tensor in flat_tensors([result]):
                if tensor.grad_fn is not None:
                    tensor.register_hook(functools.partial(_refuse_gradient, func))
            return result

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> "RowTensor":
        made: Any = DTensor.__tensor_unflatten__(
            inner_tensors, flatten_spec, outer_size, outer_stride
        )
        kind: Any = RowTensor
        found: RowTensor = kind(
            local_tensor_of(made), known_spec(made), requires_grad=made.requires_grad
        )
        return found

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Do as torch does for its own placements, from the whole tensor if rows move."""
        mesh = device_mesh or self.device_mesh
        if placements is not None and tuple(placements) == self.placements:
            return self
        _keep_rows(self)
        whole: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        if placements is not None and tuple(placements) == whole.placements:
            return whole
        return whole.redistribute(mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows; a gradient comes back as rows of the same tensor."""
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            _keep_rows(self)
            local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return local
        found: Tensor = super().to_local(grad_placements=grad_placements)
        return found


class _RowsFirst(TorchDispatchMode):
    """Asks us for operators on a RowTensor; see Note [Who asks a RowTensor]."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, tuple(args), dict(kwargs or {}))


def _only_asks(func: Callable[..., Any]) -> bool:
    """Tell whether a function gets or sets an attribute, and runs no operator."""
    if func.__name__ not in ("__get__", "__set__"):
        return False
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return attribute not in ("data", "T", "H", "mT", "mH", "real", "imag")


def _refuse_gradient(func: Callable[..., Any], grad: Tensor) -> NoReturn:
    raise ConfigError(
        f"a gradient has reached the sharded parameter that {func.__name__} was called with, past "
        f"any unit, and torch {torch.__version__} has no gradients of such operators. Remedy: "
        "weight_decay for an L2 penalty, or a penalty that the module computes of its weight in "
        "its own forward; for a tensor of your own the function on its full_tensor(), which has "
        "gradients, or torch 2.13 and newer"
    )


def _keep_rows(rows: Any) -> None:
    """See to it that gradients of several uses, which torch adds up by itself, are cut as rows."""
    watched = rows._post_accumulate_grad_hooks  # a unit's parameter, where a gradient is an error
    if ASKS_SUBCLASSES or watched or hasattr(rows, _KEEPS_ROWS):
        return
    if torch.is_grad_enabled() and rows.requires_grad and rows.is_leaf:
        place = rows.device_mesh, rows.placements, rows.shape
        setattr(rows, _KEEPS_ROWS, rows.register_hook(functools.partial(_as_rows_again, place)))


def _as_rows_again(place: tuple[Any, ...], grad: Tensor) -> Tensor:
    mesh, placements, shape = place
    return make_dtensor(local_tensor_of(grad), mesh, placements, shape)


# As torch does it for its own class, so that optimizers and clipping take lists at once.
for _types in (_optim_types, _util_types):
    if RowTensor not in _types:
        _types.append(RowTensor)
# torch.load takes weights_only=True by default.
torch.serialization.add_safe_globals([RowTensor])


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of that shape whose part here is ``local``, a view."""
    return wrap_rows(RowTensor, local.detach(), mesh, tuple(placements), tuple(shape))


class _Gather(Function):
    """From rows to the whole tensor, and back."""

    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> DTensor:
        ctx.mesh, ctx.placements = rows.device_mesh, rows.placements
        return whole_of(rows)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        kept = without_rows(ctx.placements)
        if grad.placements != kept:
            grad = grad.redistribute(ctx.mesh, kept)
        local = my_rows(local_tensor_of(grad), ctx.mesh, ctx.placements).clone()
        return make_dtensor(local, ctx.mesh, ctx.placements, grad.shape)


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, rows: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = rows.device_mesh, rows.placements, rows.shape
        local = local_tensor_of(rows)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return make_dtensor(grad, ctx.mesh, ctx.placements, ctx.shape)
