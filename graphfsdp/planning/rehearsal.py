"""Memory of whole weights and gradients, found by running the real units without numbers.

Note [Rehearsal]: what lives at one time depends on which unit gathers and reduces when, and on what
autograd keeps. So none of it is told a second time here: the functions that ``fully_shard`` is made
of run on the meta device, where nothing has memory and collectives do nothing.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.planning.activations import peak_of
from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.sharding.fully_shard import make_unit
from graphfsdp.sharding.group import ShardGroup, UnitOptions
from graphfsdp.sharding.layout import Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.model_shards import ModelShards
from graphfsdp.sharding.module import FSDPModule, join_units
from graphfsdp.sharding.plan import BufferPlan

MAX_MICROBATCHES = 3  # those between the first and the last are all alike
_NUM_BEFORE = 3  # until all units know their order, and one more
RunForward = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class PlannedMesh:
    """Ranks of a mesh (replicate, shard), counted along the inner axis first.

    With ``cuts_outside`` main weights, main grads and optimizer state are cut over both axes. Of
    ``num_expert_ranks`` neighbours each holds other experts.
    """

    num_ranks: int
    num_outer: int = 1
    cuts_outside: bool = False
    num_expert_ranks: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_outer < 1 or self.num_ranks % self.num_outer:
            raise ConfigError(
                f"num_ranks must be at least 1 and a multiple of the outer axis, got "
                f"{self.num_ranks} ranks and {self.num_outer} outer ones"
            )

    @property
    def num_inner(self) -> int:
        """Ranks that a unit's gathered weights come from."""
        return self.num_ranks // self.num_outer // self.num_expert_ranks

    def of_rank(self, rank: int) -> UnitMesh:
        """Return the mesh as a unit on that rank sees it."""
        place, inner_rank = divmod(rank // self.num_expert_ranks, self.num_inner)
        inner = cast(dist.ProcessGroup, PlannedRanks(self.num_inner, inner_rank))
        outer = None
        if self.num_outer > 1:
            outer = cast(dist.ProcessGroup, PlannedRanks(self.num_outer, place))
        return UnitMesh(cast(DeviceMesh, None), inner, outer, cuts_outside=self.cuts_outside)


@dataclass(frozen=True)
class PlannedBuffers:
    """``whole_bytes`` are the most of whole weights and gradients that live at one time.

    ``iteration_bytes`` count activations, too, which are most when there are few of the others.
    """

    whole_bytes: int
    iteration_bytes: int


class WholeBuffers:
    """Adds up the buffers of whole weights and gradients that are still alive."""

    def __init__(self) -> None:
        self._live: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        self._live = [entry for entry in self._live if not entry[0].expired()]
        return sum(num_bytes for _, num_bytes in self._live)

    def add(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        self._live.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class PlannedRanks:
    """What units ask of a process group; nothing is ever sent."""

    group_name = "planned"

    def __init__(self, num_ranks: int, rank: int = 0) -> None:
        self._num_ranks, self._rank = num_ranks, rank

    def size(self) -> int:
        return self._num_ranks

    def rank(self) -> int:
        return self._rank


class _PlannedBuffer(ShardBuffer):
    lives: WholeBuffers

    def new_whole(self, dtype: torch.dtype) -> Tensor:
        buffer = super().new_whole(dtype)
        self.lives.add(buffer)
        return buffer


class _PlannedGroup(ShardGroup):
    """Parameters that are plain tensors on the meta device, since DTensors need real ranks."""

    def __init__(
        self, modules: Sequence[nn.Module], options: UnitOptions, lives: WholeBuffers
    ) -> None:
        self._lives = lives
        super().__init__(modules, options)

    def _new_buffer(self, plan: BufferPlan, device: torch.device) -> ShardBuffer:
        buffer = _PlannedBuffer(plan, self.options.mesh, device)
        buffer.lives = self._lives
        return buffer

    def _as_dtensor(self, local: Tensor, name: str, buffer: ShardBuffer, slot: Slot) -> Any:
        return local

    def check_memory(self) -> None:
        """Pass: no value is expected."""


class _PlannedShards(ModelShards):
    def _refuse_other_structure(self) -> None:
        """Pass: there are no other ranks to compare with."""

    def _gather_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the group: another communicator takes ranks to make, and changes no lifetime."""
        return group


def rehearse(
    model: nn.Module,
    units: Sequence[str],
    run: RunForward,
    *,
    meshes: Mapping[str, PlannedMesh],
    rank: int,
    strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
    num_microbatches: int,
    reshard_after_forward: bool,
    overlap: bool,
) -> tuple[ModelShards, PlannedBuffers]:
    """Run iterations of a copy on the meta device; see ``plan_model``. Return its units, too.

    ``meshes`` are the units', by name; the root's is that of all others.
    """
    options = UnitOptions(
        mesh=meshes[""].of_rank(rank),
        strategy=strategy,
        policy=policy,
        reshard_after_forward=reshard_after_forward,
        overlap=overlap,
    )
    lives = WholeBuffers()
    root = _on_meta(model)
    for name in (*(name for name in units if name), ""):
        module, mesh = root.get_submodule(name), meshes.get(name, meshes[""]).of_rank(rank)
        make_unit([module], _PlannedGroup([module], replace(options, mesh=mesh), lives))
    shards = join_units(root, _PlannedShards)
    # Whoever knows the order of units runs otherwise than the first iteration.
    for _ in range(_NUM_BEFORE):
        _iterate(root, shards, run, min(num_microbatches, MAX_MICROBATCHES))
    whole_bytes = lives.peak_bytes
    iteration_bytes = peak_of(lambda: _iterate(root, shards, run, min(num_microbatches, 2)))
    return shards, PlannedBuffers(whole_bytes, iteration_bytes)


def _iterate(root: nn.Module, shards: ModelShards, run: RunForward, num_microbatches: int) -> None:
    assert isinstance(root, FSDPModule)
    for unit in shards.units:
        for item in unit.group.managed:
            item.param.grad = None
            vars(item.param).pop("decoupled_grad", None)
    with torch.enable_grad():
        for index in range(num_microbatches):
            root.set_is_last_microbatch(index == num_microbatches - 1)
            run(root).backward()
    root.finish_microbatches()


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its memory; tied parameters stay tied."""
    known: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty_like(param, device="meta", requires_grad=False)
        known[id(param)] = nn.Parameter(empty, param.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, known)
