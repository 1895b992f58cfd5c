"""The axes of meshes: those that a unit is cut over or repeated on, and those of model parallelism.

The ranks of the *inner* axis each hold a part of the unit; the ranks of the *outer* axis each hold
the same part, or cut it once more for the optimizer. Tensor and expert parallelism have cut
parameters before ``fully_shard`` does: a rank's part along their axes is what it lays out, gathers
and reduces; the other ranks' parts only show in the shape of the DTensor, in norms and in
checkpoints. What is cut has the placement ``RowShard``: whole rows, as many as happen to fall on a
rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from graphfsdp.base.collectives import all_gather_
from graphfsdp.base.memory import contiguous_stride
from graphfsdp.base.torch_internals import part_and_offset
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.extension import is_extended
from graphfsdp.sharding.layout import BufferLayout, Slot


class RowShard(Shard):
    """``Shard(0)`` with any number of rows per rank.

    It knows which rows each rank holds, where ``Shard`` takes for granted that ``torch.chunk`` has
    cut the tensor: so torch.distributed.checkpoint finds the right rows (``distribute_tensor`` does
    not: torch puts a plain ``Shard`` in the place of any child of it). Operators on tensors with
    it are those of ``RowTensor``, never torch's for shards.

    ``borders``: first row of each part, and behind the last one the number of rows. ``order``:
    which part each rank holds; None if they are in the order of the ranks.
    """

    borders: tuple[int, ...]
    order: tuple[int, ...] | None

    def __init__(self, borders: Sequence[int], order: Sequence[int] | None = None) -> None:
        super().__init__(0)
        self.borders = tuple(borders)
        self.order = None if order is None else tuple(order)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row that a rank holds, and how many it holds."""
        part = rank if self.order is None else self.order[rank]
        return self.borders[part], self.borders[part + 1] - self.borders[part]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self.borders == other.borders and self.order == other.order
        # Shard(0), so that torch makes DTensors with it. It looks up by equal placements what it
        # has worked out for an operator, but never for a RowTensor.
        return super().__eq__(other)  # maybe NotImplemented, which bool() would take for True

    def __hash__(self) -> int:
        return hash((type(self), self.borders, self.order))

    def __repr__(self) -> str:
        return f"RowShard({self.borders}{'' if self.order is None else f', {self.order}'})"

    def __reduce__(self) -> tuple[type["RowShard"], tuple[Any, ...]]:
        return (type(self), (self.borders, self.order))

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        """Return how many rows a rank holds, and the first of them."""
        assert (curr_local_size, num_chunks) == (self.borders[-1], len(self.borders) - 1)
        first, num_rows = self.rows_of(rank)
        return num_rows, first

    def _to_replicate_tensor(
        self,
        local_tensor: Tensor,  # [rows here, ...]
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
    ) -> Tensor:
        """Return [rows, ...] of all ranks, of which no view is made. Capture: one exchange."""
        group = mesh.get_group(mesh_dim)
        counts = [self.rows_of(rank)[1] for rank in range(group.size())]
        padded = local_tensor.new_zeros((max(counts), *local_tensor.shape[1:]))
        padded[: local_tensor.shape[0]] = local_tensor
        parts = padded.new_empty((len(counts), *padded.shape))
        if padded.numel():
            all_gather_(parts.view(-1), padded.view(-1), group)
        found = [part[:count] for part, count in zip(parts, counts, strict=True)]
        if self.order is not None:
            found = [found[self.order.index(part)] for part in range(len(found))]
        return torch.cat(found)


# As torch does it for its own placements: torch.load takes weights_only=True by default.
torch.serialization.add_safe_globals([RowShard])


class PlacementError(ConfigError, AssertionError):
    """A parameter has no such dimension; torch's is an AssertionError."""


@dataclass(frozen=True)
class UnitMesh:
    """The ranks of a unit.

    ``mesh`` is that of the parameters' DTensors: (inner,), or (outer, inner), or one axis with all
    ranks where the optimizer's part is cut over both, so with ``cuts_outside``. Ranks of ``outer``
    hold the same part, those of ``experts`` other experts, but see a part of the same batch.
    """

    mesh: DeviceMesh
    inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None = None
    cuts_outside: bool = False
    experts: DeviceMesh | None = None

    @property
    def gpu(self) -> torch.device | None:
        """This rank's, if they communicate from GPU to GPU."""
        if self.mesh.device_type != "cuda":
            return None
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def num_outer(self) -> int:
        return 1 if self.outer is None else self.outer.size()

    @property
    def num_parts(self) -> int:
        """Into how many parts main weights and optimizer state are cut."""
        return self.inner.size() * (self.num_outer if self.cuts_outside else 1)

    @property
    def part(self) -> int:
        """Which of them this rank holds. The parts of an inner rank are neighbours."""
        inner = self.inner.rank()
        if not self.cuts_outside or self.outer is None:
            return inner
        return inner * self.num_outer + self.outer.rank()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.inner,) if self.outer is None else (self.inner, self.outer)

    @property
    def cut_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups that gradients are cut over: those whose ranks hold other elements."""
        return self.groups if self.cuts_outside else (self.inner,)

    def placements(self, layout: BufferLayout, slot: Slot, *, sharded: bool) -> list[Placement]:
        if not sharded:
            return [Replicate() for _ in range(self.mesh.ndim)]
        borders = layout.borders(slot)
        if not self.cuts_outside:
            whole: list[Placement] = [Replicate() for _ in range(self.mesh.ndim - 1)]
            return [*whole, Shard(slot.dim) if slot.dim else RowShard(borders)]
        # The mesh counts ranks along the inner axis first, the layout along the outer one.
        num_inner, num_outer = self.inner.size(), self.num_outer
        order = [i * num_outer + o for o in range(num_outer) for i in range(num_inner)]
        return [RowShard(borders, order)]


def find_axes(
    mesh: DeviceMesh,
    *,
    shard_axis: str | None = None,
    replicate_axis: str | None = None,
    expert_axis: str | None = None,
    cuts_outside: bool = False,
) -> UnitMesh:
    """Arguments are those of ``fully_shard``; ConfigError if the mesh has other axes."""
    chosen = _select(mesh, shard_axis, replicate_axis, expert_axis)
    experts = None if expert_axis is None else mesh[expert_axis]
    if chosen.ndim == 1:
        if cuts_outside:
            raise ConfigError(
                "outer_strategy='optim' cuts optimizer state over a second mesh axis, but "
                f"fully_shard was given {_axes(chosen)}. Remedy: a 2-D mesh (replicate, shard)"
            )
        return UnitMesh(chosen, chosen.get_group(), experts=experts)
    outer, inner = chosen.get_group(0), chosen.get_group(1)
    if outer.size() == 1:
        return UnitMesh(chosen, inner, experts=experts)
    if cuts_outside:
        return UnitMesh(_flat(chosen), inner, outer, cuts_outside=True, experts=experts)
    return UnitMesh(chosen, inner, outer, experts=experts)


def _select(
    mesh: DeviceMesh, shard_axis: str | None, replicate_axis: str | None, expert_axis: str | None
) -> DeviceMesh:
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh that fully_shard was given "
            f"({mesh.mesh.tolist()}). Remedy: call it on the ranks of the mesh alone"
        )
    names = mesh.mesh_dim_names or ()
    asked = tuple(name for name in (replicate_axis, shard_axis) if name is not None)
    if not asked and expert_axis is None and mesh.ndim <= 2:
        return mesh
    rest = tuple(name for name in names if name != expert_axis)
    chosen = asked or rest
    in_order = tuple(name for name in rest if name in chosen)
    fits = chosen == in_order and 0 < len(chosen) <= 2 and expert_axis in (None, *names)
    if not fits or (shard_axis is None and replicate_axis is not None):
        raise ConfigError(
            f"fully_shard cannot tell which of {_axes(mesh)} to shard over, with "
            f"shard_axis={shard_axis!r}, replicate_axis={replicate_axis!r} and "
            f"expert_axis={expert_axis!r}. Remedy: names of different axes of the mesh, "
            "replicate_axis before shard_axis, which plain data parallelism (strategy='no_shard') "
            "names too; or pass those axes alone, such as mesh['dp_replicate', 'dp_shard']"
        )
    return mesh if names == chosen else mesh[chosen]


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            "outer_strategy='optim' needs a mesh with named axes. Remedy: init_device_mesh(..., "
            "mesh_dim_names=('dp_replicate', 'dp_shard'))"
        )
    flat: DeviceMesh = mesh._flatten("_".join(mesh.mesh_dim_names))
    return flat


def _axes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    return f"a mesh of shape {tuple(mesh.shape)} with " + (
        f"the axes {names}" if names else "axes that have no names"
    )


def find_place(
    name: str, param: nn.Parameter, place: Callable[[nn.Parameter], Any] | None, unit: UnitMesh
) -> tuple[int, UnitMesh]:
    """Return the dimension that a ``shard_placement_fn`` wants cut, and over which ranks.

    ConfigError: it asks for more than that.
    """
    wanted = None if place is None else place(param)
    over = unit
    # torch's ShardPlacementResult, which torch 2.11 does not have.
    if wanted is not None and hasattr(wanted, "mesh_info"):
        over = _mesh_of(name, wanted.mesh_info, unit)
        wanted = wanted.placement
    if wanted is None:
        return 0, over
    if type(wanted) is not Shard:
        raise ConfigError(
            f"shard_placement_fn wants {wanted!r} for {name!r}; it may say None, Shard(dim), or "
            "torch's ShardPlacementResult of these and a mesh. Remedy: None, which is Shard(0)"
        )
    if wanted.dim and not -param.dim() <= wanted.dim < param.dim():
        raise PlacementError(
            f"shard_placement_fn wants {wanted!r} for {name!r} of shape {tuple(param.shape)}, "
            f"which has {param.dim()} dimensions"
        )
    dim = wanted.dim % max(param.dim(), 1)
    if dim and (is_extended(param) or unit.cuts_outside):
        raise ConfigError(
            f"shard_placement_fn wants {wanted!r} for {name!r}, which goes neither with "
            "outer_strategy='optim' nor with fsdp_pre_all_gather. Remedy: None there"
        )
    return dim, over


def _mesh_of(name: str, info: Any, unit: UnitMesh) -> UnitMesh:
    if info.mesh == unit.mesh:
        return unit
    sharded, repeated = (getattr(info, f"{kind}_mesh_dim", None) for kind in ("shard", "replicate"))
    if unit.cuts_outside or unit.experts is not None or (repeated, sharded) not in _AXES:
        raise ConfigError(
            f"shard_placement_fn wants {name!r} on {info!r}: a parameter may have a mesh of its "
            "own that is cut over the last axis and repeated on the one before, if any; neither "
            "beside outer_strategy='optim' nor expert_axis. Remedy: such a mesh, or a fully_shard "
            "with that mesh for the module that holds the parameter"
        )
    return find_axes(info.mesh)


# Of a mesh of its own: which one is repeated on, and which one is cut over.
_AXES = ((None, 0), (0, 1))


@dataclass(frozen=True)
class ModelAxes:
    """How a parameter lies on the axes of model parallelism; ``shape`` is over all their ranks.

    ``wraps``: the module computes with a DTensor; else with this rank's part as a plain tensor.
    ``joined``: these axes, and behind them those of the unit.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    wraps: bool
    joined: DeviceMesh

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
        return tuple(self.mesh.get_group(axis) for axis in range(self.mesh.ndim))

    def offset(self, dim: int) -> int:
        """Return where this rank's part begins along a tensor dim, in the whole parameter."""
        _, offsets = part_and_offset(self.shape, self.mesh, self.placements)
        return int(offsets[dim])

    def as_seen(self, local: Tensor) -> Tensor:
        """Return this rank's part as the module computes with it; autograd goes through."""
        if not self.wraps:
            return local
        shape = torch.Size(self.shape)
        return DTensor.from_local(
            *(local, self.mesh, self.placements),
            run_check=False,
            shape=shape,
            stride=contiguous_stride(shape),
        )


def find_model_axes(
    name: str, param: nn.Parameter, data: DeviceMesh, experts: DeviceMesh | None
) -> ModelAxes | None:
    """Take a DTensor of ``parallelize_module``'s, or a plain parameter; None if on no such axis.

    Along ``experts`` each rank has other experts, as plain parameters. ConfigError: its parts are
    no plain pieces of it, or the axes do not go with those of ``data``.
    """
    placements: tuple[Placement, ...] = (Shard(0),)
    mesh, shape = experts, tuple(param.shape)
    if isinstance(param, DTensor):
        mesh, placements = param.device_mesh, tuple(param.placements)
    elif experts is not None:
        if not param.dim():
            raise ConfigError(
                f"parameter {name!r} has no dimension along which the ranks of the expert axis "
                "could each hold their own. Remedy: shape (1,), or hold it outside of the experts"
            )
        shape = (shape[0] * experts.size(), *shape[1:])
    if mesh is None:
        return None
    for axis, place in enumerate(placements):
        if not (place.is_replicate() or type(place) is Shard):
            raise ConfigError(
                f"parameter {name!r} is {place!r} on mesh axis {axis}; fully_shard takes "
                "parameters that are Shard or Replicate there. Remedy: redistribute it first"
            )
    joined = _joined(data, mesh, name)
    return ModelAxes(mesh, placements, shape, isinstance(param, DTensor), joined)


def _joined(data: DeviceMesh, model: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh of a parameter that both cut; ConfigError if they are not two axes of one mesh."""
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
