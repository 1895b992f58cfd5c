"""Memory and collectives of each rank for a model, a strategy and a number of ranks.

What the layout decides comes from the functions that lay out the real run, so it is exact to the
byte. Nothing here allocates: the model may lie on the meta device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from graphfsdp.config import MixedPrecisionPolicy, OverlapPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.planning.neighbours import state_numel, storage_bytes
from graphfsdp.planning.planned_mesh import PlannedMesh
from graphfsdp.planning.planned_units import UnitPlan, plan_units
from graphfsdp.planning.pool_rehearsal import PlannedPool, RunForward, rehearse_pool
from graphfsdp.sharding.plan import BufferPlan

ROOT = "(root)"
_NORM_BYTES = 8  # the squared norm, as float64


@dataclass(frozen=True)
class Collective:
    """What ranks do together in one iteration.

    Attributes:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        unit: Full name of the unit; "norm of the gradients" for that.
        count: Calls in one iteration.
        buffer_bytes: Bytes of the whole buffer of one call, padding included.
        num_ranks: Ranks that take part.
    """

    op: str
    unit: str
    count: int
    buffer_bytes: int
    num_ranks: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in one iteration, as a ring does it."""
        rounds = 2 if self.op == "all_reduce" else 1
        return self.count * rounds * self.buffer_bytes * (self.num_ranks - 1) // self.num_ranks


@dataclass(frozen=True)
class ModelPlan:
    """Where the parameters of a model will lie.

    Attributes:
        units: In the order of the modules, the root first; so they lie in memory.
        strategy: What is sharded.
        mesh: Ranks that share every unit.
        num_microbatches: Forwards and backwards of an iteration.
        reshard_after_forward: Whole weights are dropped between forward and backward.
        clips: The norm of the gradients is computed.
        module_buffer_bytes: Bytes of the model's own buffers (``register_buffer``).
        overlap: Which collectives run while others compute: that holds more memory.
        pool: Of whole weights and gradients; None if no forward pass was given to find it by.
    """

    units: tuple[UnitPlan, ...]
    strategy: ShardingStrategy
    mesh: PlannedMesh
    num_microbatches: int
    reshard_after_forward: bool
    clips: bool
    module_buffer_bytes: int
    overlap: OverlapPolicy
    pool: PlannedPool | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that share every unit."""
        return self.mesh.num_ranks

    @property
    def buffers(self) -> tuple[BufferPlan, ...]:
        """Every flat buffer."""
        return tuple(buffer for unit in self.units for buffer in unit.buffers)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, on all ranks together."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def num_padding(self) -> int:
        """Elements that belong to no parameter, on all ranks together."""
        return sum(buffer.layout.num_padding for buffer in self.buffers)

    @property
    def main_weight_bytes(self) -> int:
        """Bytes of one rank's main weights: equal on every rank."""
        return storage_bytes(self.buffers, of_grads=False)

    @property
    def main_grad_bytes(self) -> int:
        """Bytes of one rank's main grads: equal on every rank."""
        return storage_bytes(self.buffers, of_grads=True)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of whole weights that live at one time, in the dtype of the computation.

        With ``optim_grads_params`` these are the root's, which is in its forward pass all the
        time, and those of the largest unit inside it; with prefetch, of the two largest that
        follow each other.
        """
        casts = self.cast_bytes
        sizes = [unit.full_bytes for unit in self.units]
        if self.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS and self.reshard_after_forward:
            ahead = self.overlap.forward_prefetch or self.overlap.backward_prefetch
            return casts + sizes[0] + _most(sizes[1:], at_once=2 if ahead else 1)
        return casts + sum(sizes)

    @property
    def cast_bytes(self) -> int:
        """Bytes of weights in the dtype of the computation that stay for a whole iteration.

        They are copies of main weights that are not sharded, and what was gathered over the outer
        axis alone.
        """
        casts = sum(b.full_bytes for b in self.buffers if not b.sharded and _casts(b))
        if self.mesh.cuts_outside and self.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS:
            casts += sum(b.full_bytes for b in self.buffers if b.sharded) // self.mesh.num_inner
        return casts

    @property
    def unreduced_grad_bytes(self) -> int:
        """Bytes of whole gradients that wait to be reduced, or are, at one time."""
        waiting = [
            sum(b.full_grad_bytes for b in unit.buffers if b.sharded or not _in_place(b))
            for unit in self.units
        ]
        keeps = self.strategy.stage < 2 and self.num_microbatches > 1
        in_order = [*reversed(waiting[1:]), *waiting[:1]]  # the root's embedding comes last
        once = _most(in_order, at_once=2 if self.overlap.reduce_grads else 1)
        whole = sum(waiting) if keeps else once
        return whole + self.unreduced_outside_bytes

    @property
    def unreduced_outside_bytes(self) -> int:
        """Bytes of gradients that are reduced over the inner axis alone, beside the main grads."""
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

    def collectives(self) -> tuple[Collective, ...]:
        """Return what ranks do together in one iteration.

        A buffer of which the backward pass needs no weight (biases that the layout could not put
        beside their matrices) is gathered once less than is counted here.
        """
        found = []
        for unit in self.units:
            name = unit.name or ROOT
            for buffer in unit.buffers:
                if not buffer.layout.total_numel:
                    continue
                if buffer.sharded:
                    found.append(self._call("all_gather", name, self._gathers, buffer.full_bytes))
                if buffer.trainable:
                    op = "reduce_scatter" if buffer.sharded else "all_reduce"
                    found.append(self._call(op, name, self._reduces, buffer.full_grad_bytes))
                found += self._outside(name, buffer)
        if self.clips and any(buffer.sharded and buffer.trainable for buffer in self.buffers):
            norm = Collective("all_reduce", "norm of the gradients", 1, _NORM_BYTES, 1)
            found.append(replace(norm, num_ranks=self.mesh.num_inner))
            if self.mesh.cuts_outside and self.mesh.num_outer > 1:
                found.append(replace(norm, num_ranks=self.mesh.num_outer))
        return tuple(found)

    def _outside(self, name: str, buffer: BufferPlan) -> Iterator[Collective]:
        """Yield what the ranks of the outer axis do with a buffer in one iteration."""
        if self.mesh.num_outer == 1:
            return
        share = self.mesh.num_inner if buffer.sharded else 1
        cuts = buffer.sharded and self.mesh.cuts_outside
        name = f"{name}, outer axis"
        if cuts:
            num_bytes = buffer.full_bytes // share
            yield Collective("all_gather", name, 1, num_bytes, self.mesh.num_outer)
        if buffer.trainable:
            op = "reduce_scatter" if cuts else "all_reduce"
            num_bytes = buffer.full_grad_bytes // share
            yield Collective(op, name, 1, num_bytes, self.mesh.num_outer)

    def state_bytes(self, rank: int = 0, *, num_moments: int = 2, moment_itemsize: int = 4) -> int:
        """Return the bytes of FusedAdam's state on a rank, step counts included.

        Exact for a FusedAdam whose groups are the matrices and the vectors, as the trainer makes
        it; other groups move a few borders of 256 bytes.

        Args:
            rank: Whose state.
            num_moments: Tensors of the size of the main weights.
            moment_itemsize: Bytes of an element of them.
        """
        num_params = sum(len(buffer.names) for buffer in self.buffers if buffer.trainable)
        numel = state_numel(self.buffers, self.mesh.part(rank))
        return num_moments * moment_itemsize * numel + 4 * num_params

    @property
    def _gathers(self) -> int:
        if self.strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS:
            return 1
        return self.num_microbatches * (2 if self.reshard_after_forward else 1)

    @property
    def _reduces(self) -> int:
        return self.num_microbatches if self.strategy.stage >= 2 else 1

    def _call(self, op: str, unit: str, count: int, num_bytes: int) -> Collective:
        return Collective(op, unit, count, num_bytes, self.mesh.num_inner)


def plan_model(
    model: nn.Module,
    units: Sequence[str],
    *,
    num_ranks: int,
    num_outer: int = 1,
    cuts_outside: bool = False,
    strategy: str | int | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS,
    mp_policy: MixedPrecisionPolicy | None = None,
    num_microbatches: int = 1,
    reshard_after_forward: bool = True,
    clips: bool = True,
    overlap: bool | OverlapPolicy = True,
    run: RunForward | None = None,
) -> ModelPlan:
    """Lay a model out as ``fully_shard`` would, without ranks and without memory.

    Args:
        model: On any device; its parameters are looked at, not touched.
        units: Full names of the modules that are wrapped one by one, in the order of wrapping;
            the root comes last by itself.
        num_ranks: Ranks that share every unit.
        num_outer: How many of them hold the same shard: ranks of the outer axis.
        cuts_outside: Main weights, main grads and optimizer state are cut over these too.
        strategy: As for ``fully_shard``.
        mp_policy: As for ``fully_shard``.
        num_microbatches: Forwards and backwards of an iteration.
        reshard_after_forward: As for ``fully_shard``.
        clips: Whether the norm of the gradients is computed.
        overlap: As for ``fully_shard``.
        run: ``run(copy)`` is the forward pass of one micro-batch of a copy of the model on the
            meta device, and returns the loss; so the pool is found to the byte.

    Returns:
        The plan.

    Raises:
        ConfigError: there is no such module, or a number is out of range.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ConfigError(
            f"num_ranks and num_microbatches must be at least 1, got {num_ranks} and "
            f"{num_microbatches}"
        )
    parsed, policy = ShardingStrategy.parse(strategy), mp_policy or MixedPrecisionPolicy()
    mesh = PlannedMesh(num_ranks, num_outer, cuts_outside and num_outer > 1)
    plan = ModelPlan(
        units=plan_units(model, units, policy=policy, strategy=parsed, num_parts=mesh.num_parts),
        strategy=parsed,
        mesh=mesh,
        num_microbatches=num_microbatches,
        reshard_after_forward=reshard_after_forward,
        clips=clips,
        module_buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        overlap=OverlapPolicy.parse(overlap),
    )
    if run is None:
        return plan
    pool = rehearse_pool(
        model,
        units,
        run,
        mesh=mesh,
        strategy=parsed,
        policy=policy,
        num_microbatches=num_microbatches,
        reshard_after_forward=reshard_after_forward,
        overlap=plan.overlap,
    )
    return replace(plan, pool=pool)


def _most(sizes: Sequence[int], *, at_once: int) -> int:
    """Return the largest sum of neighbours."""
    return max((sum(sizes[first : first + at_once]) for first in range(len(sizes))), default=0)


def _casts(buffer: BufferPlan) -> bool:
    """Tell whether the weights that compute are a copy of the main weights."""
    return buffer.dtypes.compute != buffer.dtypes.main


def _in_place(buffer: BufferPlan) -> bool:
    """Tell whether whole gradients land in the main grads themselves."""
    return not buffer.sharded and buffer.dtypes.comm == buffer.dtypes.grad


__all__ = ["ROOT", "Collective", "ModelPlan", "UnitPlan", "plan_model"]
