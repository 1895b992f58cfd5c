"""Memory and collectives of each rank for a model, a strategy and a number of ranks.

What the layout decides comes from the functions that lay out the real run, so it is exact to the
byte. Nothing here allocates: the model may lie on the meta device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from graphfsdp.base.torch_internals import key_of
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.rehearsal import (
    Collective,
    PlannedBuffers,
    PlannedMesh,
    RunForward,
    rehearse,
)
from graphfsdp.sharding.group import UnitOptions
from graphfsdp.sharding.layout import BufferLayout
from graphfsdp.sharding.plan import BufferPlan
from graphfsdp.sharding.unit import Unit

_NORM_BYTES = 8  # the squared norm, as float64


@dataclass(frozen=True)
class UnitPlan:
    """The flat buffers of one module that ``fully_shard`` wraps; the root's name is ""."""

    name: str
    buffers: tuple[BufferPlan, ...]
    mesh: PlannedMesh


@dataclass(frozen=True)
class ModelPlan:
    """Where the parameters of a model will lie.

    ``units`` are in the order of the modules, the root first; so they lie in memory. Bytes are of
    one rank, and but for those of the optimizer's state equal on every rank.
    """

    units: tuple[UnitPlan, ...]
    strategy: ShardingStrategy
    mesh: PlannedMesh
    num_microbatches: int
    module_buffer_bytes: int
    main_weight_bytes: int
    main_grad_bytes: int
    state_bytes: int
    whole: PlannedBuffers
    collectives: tuple[Collective, ...]  # of one iteration, the norm of the gradients included

    @property
    def num_ranks(self) -> int:
        return self.mesh.num_ranks

    @property
    def buffers(self) -> tuple[BufferPlan, ...]:
        return tuple(buffer for unit in self.units for buffer in unit.buffers)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, on all ranks together."""
        return self._of_all_ranks(lambda layout: layout.numel)

    @property
    def num_padding(self) -> int:
        """Elements that belong to no parameter, on all ranks together."""
        return self._of_all_ranks(lambda layout: layout.num_padding)

    def _of_all_ranks(self, count: Callable[[BufferLayout], int]) -> int:
        return sum(
            unit.mesh.num_expert_ranks * count(buffer.layout)
            for unit in self.units
            for buffer in unit.buffers
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of 8-bit shards, which stay from one iteration to the next."""
        return sum(buffer.packed_bytes for buffer in self.buffers)

    @property
    def cast_bytes(self) -> int:
        """Bytes of weights in the dtype of the computation that an iteration makes and keeps.

        They are copies of main weights that are not sharded, and what was gathered over the outer
        axis alone.
        """
        casts = sum(
            buffer.full_bytes
            for buffer in self.buffers
            if not buffer.sharded
            and (buffer.gather_format or buffer.dtypes.compute != buffer.dtypes.main)
        )
        if self.mesh.cuts_outside and self.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS:
            casts += sum(b.gather_bytes for b in self.buffers if b.sharded) // self.mesh.num_inner
        return casts

    @property
    def unreduced_outside_bytes(self) -> int:
        """Gradients that are reduced over the inner axis alone, beside the main grads."""
        if not self.mesh.cuts_outside:
            return 0  # the main grads themselves
        waiting = [
            sum(
                b.layout.total_numel * b.dtypes.grad.itemsize
                for b in unit.buffers
                if b.sharded and b.trainable
            )
            // self.mesh.num_inner
            for unit in self.units
        ]
        keeps = self.strategy.stage >= 2 and self.num_microbatches > 1
        return sum(waiting) if keeps else max(waiting, default=0)


def plan_model(
    model: nn.Module,
    units: Sequence[str],
    run: RunForward,
    *,
    num_ranks: int,
    rank: int = 0,
    num_outer: int = 1,
    cuts_outside: bool = False,
    expert_units: Sequence[str] = (),
    num_expert_ranks: int = 1,
    strategy: str | int | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS,
    mp_policy: MixedPrecisionPolicy | None = None,
    num_microbatches: int = 1,
    reshard_after_forward: bool = True,
    overlap: bool = True,
) -> ModelPlan:
    """Lay a model out as ``fully_shard`` would, without ranks and without memory.

    ``units`` are in the order of wrapping; the root comes last by itself. ``run(copy)`` is the
    forward pass of a micro-batch of a copy on the meta device, and returns the loss. ``num_outer``
    of the ranks hold the same shard; with ``cuts_outside`` main weights, main grads and optimizer
    state are cut over these too. ``num_expert_ranks`` share out the experts in ``expert_units``, of
    which the model has those of one rank.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ConfigError(
            f"num_ranks and num_microbatches must be at least 1, got {num_ranks} and "
            f"{num_microbatches}"
        )
    modules = dict(model.named_modules())
    unknown = [name for name in units if name not in modules]
    if unknown:
        raise ConfigError(f"the model has no module {unknown[0]!r}; units are full names")
    mesh = PlannedMesh(num_ranks, num_outer, cuts_outside and num_outer > 1)
    apart = PlannedMesh(num_ranks, num_expert_ranks=num_expert_ranks)
    meshes = {"": mesh} | dict.fromkeys(expert_units, apart)
    options = UnitOptions(
        mesh=mesh.of_rank(rank),
        strategy=ShardingStrategy.parse(strategy),
        policy=mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward=reshard_after_forward,
        overlap=overlap,
    )
    shards, whole, calls = rehearse(
        model,
        units,
        run,
        meshes=meshes,
        rank=rank,
        options=options,
        num_microbatches=num_microbatches,
    )
    buffers = [buffer for unit in shards.units for buffer in unit.group.buffers]
    axes = [mesh.num_inner, *([num_outer] if mesh.cuts_outside else [])]
    if num_expert_ranks > 1:
        axes += [ranks for ranks in (apart.num_inner, num_expert_ranks) if ranks > 1]
    is_cut = any(buffer.sharded and buffer.trainable for buffer in buffers)
    norm = "norm of the gradients"
    norms = [Collective("all_reduce", norm, 1, _NORM_BYTES, size) for size in axes if is_cut]
    return ModelPlan(
        units=tuple(
            UnitPlan(
                unit.group.name,
                tuple(buffer.plan for buffer in unit.group.buffers),
                meshes.get(unit.group.name, mesh),
            )
            for unit in shards.units
        ),
        strategy=options.strategy,
        mesh=mesh,
        num_microbatches=num_microbatches,
        module_buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        main_weight_bytes=_storage_bytes(buffer.main for buffer in buffers),
        main_grad_bytes=_storage_bytes(b.grad for b in buffers if b.grad is not None),
        state_bytes=_state_bytes(shards.units),
        whole=whole,
        collectives=(*calls, *norms),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {key_of(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _state_bytes(units: Iterable[Unit]) -> int:
    """Return the bytes of a FusedAdam's state, step counts included.

    Its groups are the matrices and the vectors, as the trainer makes it; others move a few borders.
    """
    managed = (item for unit in units for item in unit.group.managed if item.trains)
    held = [item.buffer.local_view(item.buffer.main, item.slot).detach() for item in managed]
    if not held:
        return 0
    matrices, vectors = ([t for t in held if (t.dim() >= 2) == wide] for wide in (True, False))
    optimizer = FusedAdam([{"params": matrices}, {"params": vectors}])
    optimizer.create_missing(held)
    return _storage_bytes(value for state in optimizer.state.values() for value in state.values())
