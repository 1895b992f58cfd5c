"""Looks into a model between iterations: norms, values that are not finite, and memory.

For models that ``fully_shard`` has cut, for other DTensors and for plain models. All ranks must
call each function together; every one reads values on the host, so none belongs into an
iteration that is captured. ``shard_table`` looks at memory alone.

Shapes: P = parameters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import RankGroups, local_part, mesh_groups, sharding_groups
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.module import FSDPModule, unit_of
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


def shard_table(model: nn.Module) -> str:
    """Return the flat buffers of a model and what lies in them, as this rank sees them.

    A line for each buffer (strategy, ranks, padding, dtypes, bytes), and one for each parameter in
    it: first element in the buffer, shape, this rank's rows, and where these lie, in bytes from the
    start of the storage that holds the main weights of all units.

    Raises:
        ConfigError: ``fully_shard`` has wrapped no module of it.
    """
    lines = []
    for name, unit in named_units(model):
        for number, buffer in enumerate(unit.group.buffers):
            plan, layout = buffer.plan, buffer.plan.layout
            kinds = ", ".join(
                f"{kind} {str(getattr(plan.dtypes, kind)).removeprefix('torch.')}"
                for kind in ("compute", "main", "grad")
            )
            grad_bytes = 0 if buffer.grad is None else buffer.grad.nbytes
            lines += [
                f"{name or '(root)'} buffer {number}: {plan.strategy.value}, {layout.num_ranks} "
                f"ranks x {layout.shard_numel:,} elements ({layout.num_padding:,} padding), "
                f"{kinds}{'' if plan.trainable else ', frozen'}",
                f"  here: main weights {buffer.main.nbytes:,} bytes, main grads {grad_bytes:,}; "
                f"gathered {plan.full_bytes:,}",
            ]
            for item in unit.group.managed:
                if item.buffer is buffer:
                    local, held = local_part(item.param).detach(), buffer.local_rows(item.slot)
                    rows = f"rows [{held.first_row}, {held.first_row + held.num_rows})"
                    lines.append(
                        f"  {item.slot.offset:>12,}  {f'{name}.{item.name}'.lstrip('.')} "
                        f"{list(item.slot.shape)}: {rows if held.num_rows else 'no rows'} here, "
                        f"{local.nbytes:,} bytes at "
                        f"{int(local.storage_offset()) * local.element_size():,}"
                    )
    return "\n".join(lines)


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
