"""Whole weights and gradients, and collectives, found by running the real units without numbers.

Note [Rehearsal]: what lives at one time depends on which unit gathers and reduces when, and on what
autograd keeps. So none of it is told a second time here: the functions that ``fully_shard`` is made
of run on the meta device, where nothing has memory, and collectives do nothing but be counted.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from graphfsdp.errors import ConfigError
from graphfsdp.planning.activations import Lives, Watching, peak_of
from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.sharding.fully_shard import make_unit
from graphfsdp.sharding.group import ShardGroup, UnitOptions
from graphfsdp.sharding.layout import Slot
from graphfsdp.sharding.mesh import UnitMesh
from graphfsdp.sharding.model_shards import ModelShards
from graphfsdp.sharding.module import FSDPModule, join_units
from graphfsdp.sharding.plan import BufferPlan

ROOT = "(root)"
EXPERTS = "tokens of experts"
MAX_MICROBATCHES = 3  # those between the first and the last are all alike
_NUM_BEFORE = 3  # until all units know their order, and one more
RunForward = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Collective:
    """What ranks do together, ``count`` times in one iteration.

    ``buffer_bytes`` are of the whole buffer of one call, padding included.
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

    def of_rank(self, rank: int, unit: str = ROOT) -> UnitMesh:
        """Return the mesh as a unit on that rank sees it."""
        place, inner_rank = divmod(rank // self.num_expert_ranks, self.num_inner)
        inner = planned_ranks(self.num_inner, unit, inner_rank)
        outer = None
        if self.num_outer > 1:
            outer = planned_ranks(self.num_outer, f"{unit}, outer axis", place)
        return UnitMesh(cast(DeviceMesh, None), inner, outer, cuts_outside=self.cuts_outside)


@dataclass(frozen=True)
class PlannedBuffers:
    """``whole_bytes`` are the most of whole weights and gradients that live at one time.

    ``iteration_bytes`` count activations, too, which are most when there are few of the others.
    """

    whole_bytes: int
    iteration_bytes: int


@dataclass(frozen=True)
class PlannedRanks:
    """What units ask of a process group; nothing is ever sent. ``whose`` collectives it serves."""

    num_ranks: int
    my_rank: int
    whose: str = field(compare=False)  # units on the same ranks are on the same ranks

    @property
    def group_name(self) -> str:
        return f"{self.num_ranks} {self.whose}"

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.my_rank


def planned_ranks(num_ranks: int, whose: str, rank: int = 0) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, PlannedRanks(num_ranks, rank, whose))


class _Calls(Counter[Collective]):
    """The collectives of planned ranks, as collectives of one call each."""

    def see(self, func: Any, args: Sequence[Any], result: Any) -> None:
        op = func.name().removeprefix("graphfsdp::").removesuffix("_")
        if op not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            return
        tensors = [each for each in args if isinstance(each, Tensor)]
        num_ranks, whose = next(each for each in args if isinstance(each, str)).split(" ", 1)
        if "max" in args:
            whose = "largest weights, for their scales"
        elif op == "all_to_all" and not tensors[0].is_floating_point():
            whose = "numbers of tokens"
        num_bytes = max(tensor.nbytes for tensor in tensors)
        self[Collective(op, whose, 1, num_bytes, int(num_ranks))] += 1


class _PlannedBuffer(ShardBuffer):
    lives: Lives

    def new_whole(self, dtype: torch.dtype) -> Tensor:
        buffer = super().new_whole(dtype)
        self.lives.add(buffer.untyped_storage())
        return buffer


class _PlannedGroup(ShardGroup):
    """Parameters that are plain tensors on the meta device, since DTensors need real ranks."""

    def __init__(self, modules: Sequence[nn.Module], options: UnitOptions, lives: Lives) -> None:
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
    options: UnitOptions,
    num_microbatches: int,
) -> tuple[ModelShards, PlannedBuffers, list[Collective]]:
    """Run iterations of a copy on the meta device; see ``plan_model``.

    Return its units, too, and the collectives of an iteration in the order of their first calls.
    ``meshes`` are the units', by name; the root's is that of all others.
    """
    lives = Lives()
    root = _on_meta(model)
    for name in (*(name for name in units if name), ""):
        mesh = meshes.get(name, meshes[""]).of_rank(rank, name or ROOT)
        module = root.get_submodule(name)
        make_unit([module], _PlannedGroup([module], replace(options, mesh=mesh), lives))
    shards = join_units(root, _PlannedShards)
    # Whoever knows the order of units runs otherwise than the first iteration.
    for _ in range(_NUM_BEFORE):
        calls = _iterate(root, shards, run, min(num_microbatches, MAX_MICROBATCHES))
    whole_bytes = lives.peak_bytes
    few: Counter[Collective] = Counter()
    iteration_bytes = peak_of(
        lambda: few.update(_iterate(root, shards, run, min(num_microbatches, 2)))
    )
    found = [
        replace(call, count=few[call] + (count - few[call]) * max(num_microbatches - 2, 0))
        for call, count in calls.items()
    ]
    return shards, PlannedBuffers(whole_bytes, iteration_bytes), found


def _iterate(
    root: nn.Module, shards: ModelShards, run: RunForward, num_microbatches: int
) -> Counter[Collective]:
    assert isinstance(root, FSDPModule)
    for unit in shards.units:
        for item in unit.group.managed:
            item.param.grad = None
            vars(item.param).pop("decoupled_grad", None)
    calls = _Calls()
    with torch.enable_grad(), Watching(calls.see):
        for index in range(num_microbatches):
            root.set_is_last_microbatch(index == num_microbatches - 1)
            run(root).backward()
        root.finish_microbatches()
    return calls


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its memory; tied parameters stay tied."""
    known: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty_like(param, device="meta", requires_grad=False)
        known[id(param)] = nn.Parameter(empty, param.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, known)
