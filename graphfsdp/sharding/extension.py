"""FSDP2's extension point: weights that say themselves what is gathered of them.

A parameter whose class has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torchao's
``WeightWithDynamicFloat8CastTensor``, say) wraps one tensor, its main weight. It has a buffer of
its own, cut into as many rows on each rank. Before each gather the wrapper over this rank's rows
gives the tensors to gather, and afterwards makes the weight that modules compute with from what
has arrived; both are called as FSDP2 calls them, the second one without ``out``.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from graphfsdp.base.dtensors import EXTENSION, local_part
from graphfsdp.base.torch_internals import is_traceable_wrapper_subclass
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import ConfigError


class Extension:
    """A wrapper's side of one buffer; ``weight`` is what it has made last, while it is gathered."""

    def __init__(
        self,
        name: str,
        whole: Tensor,
        owner: nn.Module,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        policy: MixedPrecisionPolicy,
    ) -> None:
        """ConfigError: the wrapper is of a kind that cannot lie over a shard."""
        self._refuse(name, whole, mesh)
        (self._inner,), self._context = whole.__tensor_flatten__()  # type: ignore[attr-defined]
        self._kind: Any = type(whole)
        self._shape, self._stride = whole.shape, whole.stride()
        self._owner, self._dtype, self._policy = owner, dtype, policy
        self._mesh = mesh
        if mesh.ndim > 1:
            assert mesh.mesh_dim_names is not None
            self._mesh = mesh[mesh.mesh_dim_names[-1]]
        self._local: Any = None
        self._sizes: list[tuple[torch.Size, torch.dtype]] = []
        self._metadata: Any = None
        self.weight: Tensor | None = None

    @staticmethod
    def _refuse(name: str, whole: Tensor, mesh: DeviceMesh) -> None:
        kind = type(whole).__name__
        parts: Sequence[str] = parts_of(whole) if is_traceable_wrapper_subclass(whole) else []
        if len(parts) != 1 or getattr(whole, parts[0]).shape != whole.shape or whole.is_meta:
            raise ConfigError(
                f"{name!r} is a {kind}, with fsdp_pre_all_gather, and fully_shard takes only those "
                f"that wrap one tensor of their own shape, with values; this one wraps {parts} on "
                f"{whole.device}. Remedy: main weights in the wrapper, which quantises them when "
                "they are gathered, and no meta device; or ignored_params={param}, so that each "
                "rank holds all of it"
            )
        if mesh.ndim > 1 and mesh.mesh_dim_names is None:
            raise ConfigError(
                f"{name!r} is a {kind}, whose fsdp_pre_all_gather is given the axis that it is cut "
                "over. Remedy: a mesh with mesh_dim_names"
            )

    def wrap(self, rows: Tensor) -> Tensor:
        """Return the wrapper over this rank's rows."""
        parts = {self._inner: rows}
        wrapped: Tensor = self._kind.__tensor_unflatten__(
            parts, self._context, rows.shape, rows.stride()
        )
        return wrapped

    def before_gather(self, local: Tensor) -> Tensor:
        """Return bytes to gather. Capture: whatever the wrapper does, maybe collectives.

        ``local``: the wrapper that the parameter holds, on which somebody may have set a scale.
        """
        self._local = local
        ask = self._local.fsdp_pre_all_gather
        arguments: list[Any] = [self._mesh]
        if len(inspect.signature(ask).parameters) > 1:
            arguments += [self._shape, self._stride, self._owner, self._policy]
        with torch.no_grad():
            inputs, self._metadata = ask(*arguments)
        self._sizes = [(each.shape, each.dtype) for each in inputs]
        parts = [each.contiguous().view(-1).view(torch.uint8) for each in inputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def after_gather(self, whole: Tensor, num_parts: int) -> None:
        """Make the weight from bytes of all parts. Capture: likewise; a copy if several tensors."""
        outputs, start = [], 0
        parts = whole.view(num_parts, -1)
        for shape, dtype in self._sizes:
            length = shape.numel() * dtype.itemsize
            part = parts.narrow(1, start, length).reshape(-1).view(dtype)
            outputs.append(part.view(num_parts * shape[0], *shape[1:]))
            start += length
        with torch.no_grad():
            self.weight, _ = self._local.fsdp_post_all_gather(
                tuple(outputs), self._metadata, self._dtype
            )


def is_extended(param: Tensor) -> bool:
    return hasattr(param, EXTENSION)


def parts_of(wrapper: Any) -> Sequence[str]:
    names, _ = wrapper.__tensor_flatten__()
    found: Sequence[str] = names
    return found


def refuse_wrapper(name: str, param: nn.Parameter) -> None:
    """Refuse a wrapper that does not say what is gathered of it: its kind would be lost."""
    held = local_part(param)
    if is_traceable_wrapper_subclass(held) and not is_extended(param):
        raise ConfigError(
            f"{name!r} is a {type(held).__name__}, which wraps {list(parts_of(held))} and does not "
            "say what ranks would gather of it: plain rows of its values would take its place. "
            "Remedy: ignored_params={param}, so that each rank holds all of it; or a wrapper of "
            f"one tensor with {EXTENSION} and fsdp_post_all_gather"
        )


def forget_values(param: Tensor) -> None:
    """Give up the memory of a wrapper that nobody needs any more."""
    (name,) = parts_of(param)
    setattr(param, name, local_part(param).new_empty(0))
