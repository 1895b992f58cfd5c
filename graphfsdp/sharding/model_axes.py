"""Parameters that model parallelism has cut before `fully_shard` does: tensor and expert parallel.

A rank's part along these axes is what `fully_shard` lays out, gathers and reduces; the other
ranks' parts only show in the shape of the DTensor, in norms and in checkpoints.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.flat_buffer import contiguous_stride
from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class ModelAxes:
    """How a parameter lies on the axes of model parallelism.

    Attributes:
        mesh: These axes.
        placements: On each of them.
        shape: Of the parameter over all ranks of these axes.
        wraps: The module computes with a DTensor; else with this rank's part as a plain tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    wraps: bool

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold other elements."""
        return tuple(
            self.mesh.get_group(axis)
            for axis, place in enumerate(self.placements)
            if not place.is_replicate()
        )

    @property
    def all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """A group for each axis."""
        return tuple(self.mesh.get_group(axis) for axis in range(self.mesh.ndim))

    def num_parts(self, dim: int) -> int:
        """Return into how many parts a tensor dim is cut along these axes."""
        return math.prod(self.mesh.size(axis) for axis in self._axes_of(dim))

    def offset(self, dim: int) -> int:
        """Return where this rank's part begins along a tensor dim, in the whole parameter."""
        part = 0
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        for axis in self._axes_of(dim):  # the first axis cuts first
            part = part * self.mesh.size(axis) + coordinate[axis]
        return part * (self.shape[dim] // self.num_parts(dim))

    def as_seen(self, local: Tensor) -> Tensor:
        """Return this rank's part as the module computes with it; autograd goes through."""
        if not self.wraps:
            return local
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=contiguous_stride(self.shape),
        )

    def _axes_of(self, dim: int) -> list[int]:
        return [axis for axis, place in enumerate(self.placements) if place.is_shard(dim)]


def find_model_axes(name: str, param: nn.Parameter, experts: DeviceMesh | None) -> ModelAxes | None:
    """Return how a parameter lies on the axes of model parallelism; None if it is on none.

    Args:
        name: Its full name.
        param: A DTensor that ``parallelize_module`` has made, or a plain parameter.
        experts: Along this axis each rank has other experts, as plain parameters.

    Raises:
        ConfigError: its parts are not equally large, or no plain pieces of it.
    """
    if isinstance(param, DTensor):
        axes = ModelAxes(param.device_mesh, tuple(param.placements), tuple(param.shape), wraps=True)
    elif experts is not None:
        if not param.dim():
            raise ConfigError(
                f"parameter {name!r} has no dimension along which the ranks of the expert axis "
                "could each hold their own. Remedy: shape (1,), or hold it outside of the experts"
            )
        shape = (param.shape[0] * experts.size(), *param.shape[1:])
        return ModelAxes(experts, (Shard(0),), shape, wraps=False)
    else:
        return None
    for axis, place in enumerate(axes.placements):
        if not (place.is_replicate() or type(place) is Shard):
            raise ConfigError(
                f"parameter {name!r} is {place!r} on mesh axis {axis}; fully_shard takes "
                "parameters that are Shard or Replicate there. Remedy: redistribute it first"
            )
    for dim, size in enumerate(axes.shape):
        num_parts = axes.num_parts(dim)
        if size % num_parts:
            raise ConfigError(
                f"dim {dim} of parameter {name!r} of shape {axes.shape} is cut into {num_parts} "
                f"parts by {axes.placements}, and {size} is no multiple of that. Remedy: pad it, "
                "or leave it whole on that axis"
            )
    return axes


def join_meshes(data: DeviceMesh, model: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh of a parameter that is cut along axes of both.

    Args:
        data: The axes of fully_shard.
        model: The axes of model parallelism.
        name: The parameter.

    Raises:
        ConfigError: they are no different axes of one mesh.
    """
    try:
        if data.mesh_dim_names is None or model.mesh_dim_names is None:
            raise RuntimeError("axes have no names")
        # In this order, in which they have cut: so each rank's rows are neighbours.
        joined = DeviceMesh._concatenate([model, data])
    except RuntimeError as error:
        raise ConfigError(
            f"parameter {name!r} lies on the mesh axes {model.mesh_dim_names} of model "
            f"parallelism, and fully_shard was given the axes {data.mesh_dim_names}, which do not "
            f"go with them ({error}). Remedy: make one mesh, such as init_device_mesh(..., "
            "mesh_dim_names=('dp', 'tp')), parallelize over mesh['tp'], and call "
            "fully_shard(module, mesh['dp'])"
        ) from error
    # torch >= 2.13 looks up axes by name whenever it redistributes, and refuses names in another
    # order than the root mesh's.
    joined._mesh_dim_names = None
    return joined
