"""Looks into a model between iterations: norms, values that are not finite, and memory.

For models that ``fully_shard`` has cut, for other DTensors and for plain models. All ranks must
call each function together; every one reads values on the host, so none belongs into an
iteration that is captured. ``shard_table`` and ``check_slices`` look at memory alone.

Shapes: P = parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import RankGroups, local_part, mesh_groups, sharding_groups
from graphfsdp.errors import ConfigError, GraphFSDPError
from graphfsdp.sharding.module import FSDPModule, unit_of
from graphfsdp.sharding.plan import BufferPlan
from graphfsdp.sharding.unit import Unit

_NO_RANK = 0


@dataclass(frozen=True)
class ParameterNorms:
    """The 2-norms of a whole parameter and of its whole gradient.

    Attributes:
        name: Full name.
        weight: Norm of the weight: of the main weight where a sharded model has one.
        grad: Norm of the gradient that the optimizer reads; None where no rank has one.
    """

    name: str
    weight: float
    grad: float | None


@dataclass(frozen=True)
class NonFinite:
    """A tensor that holds NaN or infinity.

    Attributes:
        name: Full name of the parameter.
        what: "weight" or "gradient".
        rank: Global rank that holds the values; every rank that has the whole tensor tells.
        num_nan: How many of its elements there are NaN.
        num_inf: How many are infinite.
    """

    name: str
    what: str
    rank: int
    num_nan: int
    num_inf: int

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.name!r} on rank {self.rank}: {self.num_nan} NaN, "
            f"{self.num_inf} infinite"
        )


def parameter_norms(model: nn.Module) -> tuple[ParameterNorms, ...]:
    """Return the norms of every parameter and of its gradient, over all ranks.

    One collective for each mesh axis that they are cut over, whatever the number of parameters.
    Sums of squares are float64.
    """
    named = list(model.named_parameters())
    found: dict[str, ParameterNorms] = {}
    for groups, members in _by_groups(named, sharding_groups).items():
        sums = torch.stack([_squares(param) for _, param in members])  # [P, 3]
        for group in groups:
            dist.all_reduce(sums, group=group)
        for (name, _), (weight, grad, present) in zip(members, sums.tolist(), strict=True):
            found[name] = ParameterNorms(name, weight**0.5, grad**0.5 if present else None)
    return tuple(found[name] for name, _ in named)


def find_nonfinite(model: nn.Module) -> tuple[NonFinite, ...]:
    """Return every weight and gradient that holds NaN or infinity, and on which rank.

    Every rank of the model's mesh returns the same, by parameter and then by rank: ranks that
    hold the same part of a parameter each tell what they hold. Two collectives for each mesh axis.
    """
    named = list(model.named_parameters())
    found: dict[str, list[NonFinite]] = {name: [] for name, _ in named}
    for groups, members in _by_groups(named, mesh_groups).items():
        mine = torch.stack([_bad_counts(param) for _, param in members]).tolist()  # [P, 4]
        for rank, counts in _gathered(mine, groups):
            for (name, _), row in zip(members, counts, strict=True):
                for what, (num_nan, num_inf) in (("weight", row[:2]), ("gradient", row[2:])):
                    if num_nan or num_inf:
                        found[name].append(NonFinite(name, what, rank, num_nan, num_inf))
    return tuple(item for items in found.values() for item in items)


def _by_groups(
    named: Iterable[tuple[str, nn.Parameter]], groups_of: Callable[[Tensor], RankGroups]
) -> dict[RankGroups, list[tuple[str, nn.Parameter]]]:
    """Return the parameters by the ranks that share them, in the same order on every rank."""
    found: dict[RankGroups, list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        found.setdefault(groups_of(param), []).append((name, param))
    return found


def _gradient_of(param: nn.Parameter) -> Tensor | None:
    decoupled: Tensor | None = getattr(param, "decoupled_grad", None)
    grad = param.grad if decoupled is None else decoupled
    return None if grad is None else local_part(grad).detach()


def _squares(param: nn.Parameter) -> Tensor:
    """Return [3] float64: square norms of weight and gradient here, and whether there is one."""
    local, grad = local_part(param).detach(), _gradient_of(param)
    present = torch.full((), grad is not None, dtype=torch.float64, device=local.device)
    return torch.stack([_square(local, local), _square(grad, local), present])


def _square(tensor: Tensor | None, like: Tensor) -> Tensor:
    if tensor is None:
        return torch.zeros((), dtype=torch.float64, device=like.device)
    norm: Tensor = torch.linalg.vector_norm(tensor.double())
    return norm.square()


def _bad_counts(param: nn.Parameter) -> Tensor:
    """Return [4] int64: NaN and infinite elements of the weight, then of the gradient."""
    local, grad = local_part(param).detach(), _gradient_of(param)
    none = torch.zeros((), dtype=torch.int64, device=local.device)
    counts: list[Tensor] = []
    for part in (local, grad):
        counts += [none, none] if part is None else [part.isnan().sum(), part.isinf().sum()]
    return torch.stack(counts)


def _gathered(
    mine: list[list[int]],  # [P, 4]
    groups: RankGroups,
) -> list[tuple[int, list[list[int]]]]:
    """Return global ranks in order, and what each of them has counted."""
    if not dist.is_initialized():
        return [(_NO_RANK, mine)]
    found = [(dist.get_rank(), mine)]
    # Plain parameters have no mesh: every rank has all of them.
    for group in groups or (dist.group.WORLD,):
        everyone: list[list[tuple[int, list[list[int]]]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(everyone, found, group=group)
        found = [pair for pairs in everyone for pair in pairs]
    return sorted(found)


@dataclass(frozen=True)
class ShardRow:
    """What this rank holds of one parameter.

    Attributes:
        name: Full name.
        unit: Full name of the unit's module, "" for the root.
        buffer: Number of the flat buffer in the unit.
        shape: Full shape.
        offset: First element in the flat buffer, counted over all ranks.
        first_row: First row that this rank holds.
        num_rows: How many it holds.
        local_offset: Where they begin, in bytes from the start of the storage that holds the
            main weights of all units.
        weight_bytes: Bytes of its main weight here.
    """

    name: str
    unit: str
    buffer: int
    shape: tuple[int, ...]
    offset: int
    first_row: int
    num_rows: int
    local_offset: int
    weight_bytes: int

    def __str__(self) -> str:
        held = f"rows [{self.first_row}, {self.first_row + self.num_rows})"
        return (
            f"{self.offset:>12,}  {self.name} {list(self.shape)}: "
            f"{held if self.num_rows else 'no rows'} here, {self.weight_bytes:,} bytes "
            f"at {self.local_offset:,}"
        )


@dataclass(frozen=True)
class BufferRow:
    """One flat buffer.

    Attributes:
        unit: Full name of the unit's module, "" for the root.
        buffer: Its number in the unit.
        plan: Its layout, dtypes and strategy.
        weight_bytes: This rank's main weights, padding included.
        grad_bytes: This rank's main grads, padding included.
    """

    unit: str
    buffer: int
    plan: BufferPlan
    weight_bytes: int
    grad_bytes: int

    def __str__(self) -> str:
        plan, layout = self.plan, self.plan.layout
        kinds = ", ".join(
            f"{name} {str(getattr(plan.dtypes, name)).removeprefix('torch.')}"
            for name in ("compute", "main", "grad")
        )
        return (
            f"{self.unit or '(root)'} buffer {self.buffer}: {plan.strategy.value}, "
            f"{layout.num_ranks} ranks x {layout.shard_numel:,} elements "
            f"({layout.num_padding:,} padding), {kinds}{'' if plan.trainable else ', frozen'}\n"
            f"  here: main weights {self.weight_bytes:,} bytes, main grads {self.grad_bytes:,}; "
            f"gathered {plan.full_bytes:,}"
        )


@dataclass(frozen=True)
class ShardTable:
    """The flat buffers of a model and what lies in them on this rank; ``str`` is for people."""

    buffers: tuple[BufferRow, ...]
    rows: tuple[ShardRow, ...]

    def __str__(self) -> str:
        lines = []
        for buffer in self.buffers:
            inside = (buffer.unit, buffer.buffer)
            lines.append(str(buffer))
            lines += [f"  {row}" for row in self.rows if (row.unit, row.buffer) == inside]
        return "\n".join(lines)


def shard_table(model: nn.Module) -> ShardTable:
    """Return the flat buffers of a model with offsets and bytes, as this rank sees them.

    Raises:
        ConfigError: ``fully_shard`` has wrapped no module of it.
    """
    buffers: list[BufferRow] = []
    rows: list[ShardRow] = []
    for name, unit in named_units(model):
        for number, buffer in enumerate(unit.group.buffers):
            grad_bytes = 0 if buffer.grad is None else buffer.grad.nbytes
            buffers.append(BufferRow(name, number, buffer.plan, buffer.main.nbytes, grad_bytes))
            for item in unit.group.managed:
                if item.buffer is buffer:
                    local = local_part(item.param).detach()
                    held = buffer.local_rows(item.slot)
                    rows.append(
                        ShardRow(
                            name=_join(name, item.name),
                            unit=name,
                            buffer=number,
                            shape=item.slot.shape,
                            offset=item.slot.offset,
                            first_row=held.first_row,
                            num_rows=held.num_rows,
                            local_offset=int(local.storage_offset()) * local.element_size(),
                            weight_bytes=local.nbytes,
                        )
                    )
    return ShardTable(tuple(buffers), tuple(rows))


def check_slices(model: nn.Module) -> int:
    """Check that no two local slices overlap, and that the ranks hold each row exactly once.

    Looks at the tensors that the optimizer reads and writes, not at the plan: where they really
    lie. All ranks must call it.

    Returns:
        How many slices there are on this rank.

    Raises:
        GraphFSDPError: two slices overlap, one lies outside its buffer, or a row has no owner or
            two; the parameters are named.
        ConfigError: ``fully_shard`` has wrapped no module of it.
    """
    units = named_units(model)
    slices: list[_Slice] = []
    problem = None
    for kind in ("main weight", "main grad"):
        found = sorted(_slices(units, kind), key=lambda piece: piece[:2])
        slices += found
        problem = problem or _what_is_wrong(found, kind)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)  # else the others would wait for a rank that raised
    for told in everyone:
        if told is not None:
            raise GraphFSDPError(told)
    for name, unit in units:
        _check_owners(name, unit)
    return len(slices)


_Slice = tuple[int, int, str, Tensor]  # first address, address behind it, full name, flat buffer


def _slices(units: list[tuple[str, Unit]], kind: str) -> Iterator[_Slice]:
    for unit_name, unit in units:
        for item in unit.group.managed:
            of_weight = kind == "main weight"
            tensor: Tensor | None = item.param if of_weight else item.main_grad
            whole = item.buffer.main if of_weight else item.buffer.grad
            local = None if tensor is None else local_part(tensor).detach()
            if local is not None and whole is not None and local.numel():
                start = local.data_ptr()
                yield start, start + local.nbytes, _join(unit_name, item.name), whole


def _what_is_wrong(slices: Sequence[_Slice], kind: str) -> str | None:
    """Return what is wrong with the slices of a kind on this rank, None if nothing is."""
    for (_, end, name, _), (start, _, other, _) in pairwise(slices):
        if start < end:
            return (
                f"the {kind}s of {name!r} and {other!r} overlap by {end - start} bytes on rank "
                f"{dist.get_rank()}: an update of one would change the other"
            )
    for start, end, name, whole in slices:
        if not whole.data_ptr() <= start <= end <= whole.data_ptr() + whole.nbytes:
            return (
                f"the {kind} of {name!r} lies outside its flat buffer on rank {dist.get_rank()}: "
                "the optimizer would update memory that is never gathered"
            )
    return None


def _check_owners(unit_name: str, unit: Unit) -> None:
    sharded = [item for item in unit.group.managed if item.buffer.sharded and item.slot.numel]
    if not sharded:
        return
    counts_here = [local_part(item.param).shape[0] for item in sharded]
    mine = torch.tensor(counts_here, device=sharded[0].buffer.main.device)
    for group in unit.group.options.mesh.cut_groups:
        dist.all_reduce(mine, group=group)
    for item, num_rows in zip(sharded, mine.tolist(), strict=True):
        if num_rows != item.slot.num_rows:
            raise GraphFSDPError(
                f"parameter {_join(unit_name, item.name)!r} has {item.slot.num_rows} rows, but "
                f"the ranks hold {num_rows} of them together"
            )


def named_units(model: nn.Module) -> list[tuple[str, Unit]]:
    """Return the units of a model with the full names of their modules.

    Raises:
        ConfigError: there is none.
    """
    found = [
        (name, unit_of(module))
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    ]
    if not found:
        raise ConfigError(
            f"no module of this {type(model).__name__} is sharded. Remedy: call "
            "graphfsdp.fully_shard first"
        )
    if isinstance(model, FSDPModule):
        model.prepare_shards()  # to the addresses that the shards keep
    return found


def _join(unit_name: str, name: str) -> str:
    return f"{unit_name}.{name}".lstrip(".")
