"""Adafactor: second moments of rows and columns only, always capturable, sharded or not.

Shapes: [...] a parameter's shape, or this rank's rows of it; A, B = its last two dims; [] is a 0-D
tensor.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.base.collectives import all_reduce_
from graphfsdp.base.dtensors import local_part, sharding_groups, wrap_like, wrap_rows_like
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.checks import check_placements
from graphfsdp.optim.fused.hyper_table import Row, Rule, check_lr, check_number, plain_lr
from graphfsdp.optim.whole.tensor_optimizer import TensorMember, TensorOptimizer


class Adafactor(TensorOptimizer):
    """torch.optim.Adafactor with live numbers; shards step as whole parameters do.

    State per parameter: ``step`` [] float32; ``row_var`` [..., A, 1] and ``col_var`` [..., 1, B];
    of vectors ``variance`` [...]. A sharded parameter whose gradient is missing counts as one of
    zeros. Sums over ranks are two collectives a step, whatever the number of parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            lr: Largest relative step; a tensor must be on the parameters' device.
            beta2_decay: A step's share in the second moments is its number to this power; at
                most 0.
            eps: Bound of the second moments from below, None for the unit of the parameter's
                dtype; bound of a parameter's scale, which is live as ``eps2`` of its group.
            d: Bound of an update's root mean square; at least 1.
            weight_decay: Fraction of the weight removed per unit of learning rate.
            maximize: Climb instead of descending.

        Raises:
            ConfigError: a number is out of its range, or a parameter cannot be trained.
        """
        if eps[0] is not None:
            check_number("eps[0]", eps[0], "of Adafactor")
        self._eps1 = eps[0]
        self._maximize = maximize
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps2": eps[1],
            "d": d,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_eps1": self._eps1, "_maximize": self._maximize}

    @property
    def _rule(self) -> Rule:
        return _RULE

    def _check_member(self, param: Tensor, group: Mapping[str, Any], name: str) -> None:
        what = "Adafactor sums over rows and columns"
        check_placements(param, name, what, "Shard(0) or Replicate()", dim=0)

    def _new_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        local = local_part(param.detach())
        dtype = torch.promote_types(local.dtype, torch.float32)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=local.device)

        state = {"step": torch.zeros((), dtype=torch.float32, device=local.device)}
        if local.dim() < 2:
            return {**state, "variance": wrap_like(zeros(*local.shape), param)}
        state["row_var"] = wrap_rows_like(zeros(*local.shape[:-1], 1), param)
        columns = zeros(*local.shape[:-2], 1, local.shape[-1])
        # The columns of a sharded matrix are the same on every rank.
        state["col_var"] = columns if local.dim() == 2 else wrap_rows_like(columns, param)
        return state

    def _load_numbers(self, state_dict: dict[str, Any]) -> None:
        super()._load_numbers(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if "eps" in saved:  # of torch's
                group["eps2"] = saved["eps"][1]

    def _update(
        self,
        members: list[TensorMember],
        tables: Callable[[torch.device], Tensor],
        grad_scale: Tensor | None,
    ) -> None:
        works = [
            _Work.of(member, tables(member.weight.device)[member.row], grad_scale, self._maximize)
            for member in members
        ]
        first = _sum_over_ranks(works, [_move_rows(work) for work in works])
        updates = []
        for work, sums in zip(works, first, strict=True):
            eps1 = self._eps1
            if eps1 is None:
                eps1 = torch.finfo(work.member.param.dtype).eps
            updates.append(_direction(work, sums, eps1))
        second = _sum_over_ranks(works, [update.square().sum().view(1) for update in updates])
        for work, sums, update, squares in zip(works, first, updates, second, strict=True):
            _apply(work, sums[0], update, squares[0])


class _Work(NamedTuple):
    member: TensorMember
    numbers: Tensor  # [5] float64: lr, beta2_decay, d, eps2, weight_decay
    weight: Tensor  # [...] float32, or float64
    grad: Tensor  # [...] of the same dtype
    step: Tensor  # [] float64

    @classmethod
    def of(
        cls, member: TensorMember, numbers: Tensor, grad_scale: Tensor | None, maximize: bool
    ) -> "_Work":
        wide = member.weight.to(torch.promote_types(member.weight.dtype, torch.float32))
        grad = torch.zeros_like(wide) if member.grad is None else member.grad.to(wide.dtype)
        if grad_scale is not None:
            grad = grad * grad_scale
        step = member.state["step"].add_(1).double()
        return cls(member, numbers, wide, -grad if maximize else grad, step)

    @property
    def share(self) -> Tensor:
        """[] float64, the share of this step in the second moments."""
        return self.step ** self.numbers[1]


def _move_rows(work: _Work) -> Tensor:
    """Move the second moments of rows, and return what has to be summed over ranks.

    [1] squares of weights; of a matrix also [B] squares of columns, [1] moments of its rows.
    """
    squares = work.weight.square().sum().view(1)
    if work.grad.dim() < 2:
        variance = work.member.state["variance"]
        variance.add_((work.grad.square() - variance) * work.share)
        return squares
    rows = work.member.state["row_var"]
    rows.add_((work.grad.square().mean(dim=-1, keepdim=True) - rows) * work.share)
    if work.grad.dim() > 2:
        return squares
    return torch.cat([squares, work.grad.square().sum(dim=0), rows.sum().view(1)])


def _direction(work: _Work, sums: Tensor, eps1: float) -> Tensor:
    """Return the update before it is scaled, [...]."""
    state, grad = work.member.state, work.grad
    if grad.dim() < 2:
        estimate = state["variance"].clone()
    else:
        rows, columns = state["row_var"], state["col_var"]
        if grad.dim() == 2:
            num_rows = max(1, work.member.param.shape[0])
            mean = (sums[1:-1] / num_rows).view(1, -1)
            row_mean = (sums[-1] / num_rows).view(1, 1)
        else:
            mean = grad.square().mean(dim=-2, keepdim=True)
            row_mean = rows.mean(dim=-2, keepdim=True)
        columns.add_((mean - columns) * work.share)
        estimate = rows @ columns / row_mean.clamp(min=eps1)
    return estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)


def _apply(work: _Work, weight_squares: Tensor, update: Tensor, squares: Tensor) -> None:
    lr, _, bound, eps2, weight_decay = work.numbers.unbind()
    numel = max(1, work.member.param.numel())
    rho = torch.minimum(lr, work.step.rsqrt())
    alpha = torch.maximum(eps2, (weight_squares.double() / numel).sqrt()) * rho
    excess = ((squares.double() / numel).sqrt() / bound).clamp(min=1.0)
    weight = work.weight.mul_(1 - lr * weight_decay).sub_(update * (alpha / excess))
    if weight is not work.member.weight:
        work.member.weight.copy_(weight)


def _sum_over_ranks(works: list[_Work], parts: list[Tensor]) -> list[Tensor]:
    """Return the parts summed over the ranks that share each parameter.

    Capture: no host sync; one collective for each group of ranks and dtype.
    """
    found = list(parts)
    by_group: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
    for index, work in enumerate(works):
        for group in sharding_groups(work.member.param):  # one for each mesh axis
            by_group.setdefault((group, parts[index].dtype), []).append(index)
    for (group, _), indices in by_group.items():
        packed = torch.cat([found[index] for index in indices])
        all_reduce_(packed, group, reduction="sum")
        sizes = [parts[index].numel() for index in indices]
        for index, part in zip(indices, packed.split(sizes), strict=True):
            found[index] = part
    return found


def _read(group: Mapping[str, Any]) -> Row:
    decay, bound = group["beta2_decay"], group["d"]
    return plain_lr(group), decay, bound, group["eps2"], group["weight_decay"]


def _check(group: Mapping[str, Any], row: int) -> None:
    where = f"of parameter group {row}"
    check_lr(group, row)
    for name in ("eps2", "weight_decay", "d"):
        check_number(name, group[name], where)
    if group["d"] < 1:
        raise ConfigError(f"d {where} must be at least 1, got {group['d']!r}")
    if not -float("inf") < group["beta2_decay"] <= 0:
        raise ConfigError(f"beta2_decay {where} must be at most 0, got {group['beta2_decay']!r}")


_RULE = Rule("adafactor", ("row_var", "col_var", "variance"), _read, _check)
