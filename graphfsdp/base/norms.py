"""The global gradient norm over whole and sharded tensors alike, and clipping by it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.base.dtensors import RankGroups, local_part, sharding_groups
from graphfsdp.base.protocols import MainGrad, sharded_roots
from graphfsdp.base.torch_internals import foreach_mul_
from graphfsdp.errors import ConfigError

# This rank's parts of tensors by the groups that hold the other parts; () has those that are whole,
# the same on every rank.
HeldByGroups = Mapping[RankGroups, Sequence[Tensor]]
_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


def by_groups(parts: Iterable[tuple[RankGroups, Tensor | None]]) -> HeldByGroups:
    """Sort this rank's parts of tensors; None stands for what is not here.

    Every group is named, also where nothing is here: all its ranks must take part.
    """
    found: dict[RankGroups, list[Tensor]] = {(): []}
    for groups, part in parts:
        held = found.setdefault(groups, [])
        if part is not None:
            held.append(part)
    return found


def global_norm(held: HeldByGroups, device: torch.device) -> Tensor:
    """Return [] float32, the 2-norm over all elements of all tensors on all ranks.

    Sharded gradients are given by the groups of ranks that hold the other parts: one group, or
    several where a gradient is cut over several mesh axes. What is the same on all ranks of a group
    must not name it, so that it counts once. Every rank must name the same groups in the same
    order, also one that holds no row of any tensor.

    Capture: no host sync; one collective per group.
    Source: torch.nn.utils.clip_grad_norm_, whose arithmetic this repeats where nothing is
        sharded: norm per tensor, then the norm of these.
    """
    if held.keys() == {()}:
        return _local_norm(held[()], device).float()
    squares = {}
    for groups, parts in held.items():
        # An empty tensor costs a kernel in a list.
        there = [part for part in parts if not groups or part.numel()]
        squares[groups] = _local_norm(there, device).double().square()
    return _sum_over_ranks(squares).sqrt().float()


def clip_coefficient(
    norm: Tensor,  # [] float32
    max_norm: float,
) -> Tensor:
    """Return [] float32, what brings gradients of that norm down to ``max_norm``, at most one.

    Capture: no host sync.
    Source: Pascanu et al. 2013, Algorithm 1 (arXiv:1211.5063), as torch.nn.utils.clip_grad_norm_
        computes it.
    """
    return (max_norm / (norm + _EPS)).clamp(max=1.0)


def _sum_over_ranks(parts: Mapping[RankGroups, Tensor]) -> Tensor:
    """Return [], the sum of the numbers of all ranks.

    ``parts`` are this rank's, [] each, by the groups of ranks that have others; () for a number
    that all ranks have in common. The same keys in the same order on every rank.

    Capture: no host sync; one collective per group.
    """
    found: dict[RankGroups, Tensor] = {(): parts[()]} if () in parts else {}
    waiting = {groups: part for groups, part in parts.items() if groups}
    while waiting:
        # What is cut over several axes is reduced over the last one first, and then goes along
        # with what is cut over the others alone.
        depth = max(map(len, waiting))
        group = next(groups for groups in waiting if len(groups) == depth)[-1]
        ready = [groups for groups in waiting if groups[-1] is group]
        packed = torch.stack([waiting.pop(groups) for groups in ready])
        all_reduce_(packed, group, reduction="sum")
        for groups, part in zip(ready, packed, strict=True):
            rest = groups[:-1]
            held = waiting if rest else found
            held[rest] = held[rest] + part if rest in held else part
    return found[()]


def _local_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(list(tensors), 2, _norm_dtype(tensors))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _norm_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype in which squares are summed, None for the tensors' own."""
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.float64 in dtypes:
        return torch.float64
    # Naming the dtype costs a cast per tensor even where it is float32 already.
    return None if dtypes == {torch.float32} else torch.float32


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a model in place so that their global norm is at most ``max_norm``.

    For loops without ``graphfsdp.capture``, which has ``max_grad_norm``. Every rank must call it,
    also one that holds no gradient.

    Args:
        model: Its parameters may be whole, or sharded by ``fully_shard``.
        max_norm: The limit, positive.

    Returns:
        [] float32, the norm before clipping, equal on every rank.

    Raises:
        ConfigError: ``max_norm`` is not positive, or ``model`` is no module.

    Capture: no host sync; one collective for each group of ranks that shares gradients.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. Remedy: "
            "clip_grad_norm_(model, max_norm): the module knows which gradients are sharded; for a "
            "pipeline's schedule, max_grad_norm of graphfsdp.capture, which asks all stages"
        )
    if not max_norm > 0:
        raise ConfigError(f"max_norm must be a positive number, got {max_norm!r}")
    held = _gradients(model)
    norm = global_norm(held, next(model.parameters()).device)
    scale = clip_coefficient(norm, max_norm)
    gradients = [part for parts in held.values() for part in parts]
    if gradients:
        foreach_mul_(gradients, scale)
    return norm


def _gradients(model: nn.Module) -> HeldByGroups:
    managed: dict[nn.Parameter, MainGrad] = {}
    for root in sharded_roots(model):
        managed.update(root.main_grads())
    found: list[tuple[RankGroups, Tensor | None]] = [
        (each.groups, None) for each in managed.values()
    ]
    for param in model.parameters():
        decoupled = param in managed and managed[param].decoupled
        grad = getattr(param, "decoupled_grad", None) if decoupled else param.grad
        if grad is not None:
            groups = managed[param].groups if param in managed else sharding_groups(grad)
            found.append((groups, local_part(grad)))
    return by_groups(found)
