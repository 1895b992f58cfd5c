"""Muon: momentum whose matrices are made orthogonal, always capturable, sharded or not.

Sharded matrices are gathered from the parts that ranks hold, all of them in one collective per
mesh axis.

Shapes: A, B = rows and columns of a matrix; S = elements of one rank's parts of all matrices; [] is
a 0-D tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.base.collectives import all_gather_
from graphfsdp.base.dtensors import is_dtensor, local_part, wrap_like
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.live_optimizer import (
    LiveOptimizer,
    Row,
    Rule,
    StepControl,
    check_betas,
    check_number,
)
from graphfsdp.optim.fused.state import (
    Flags,
    Saved,
    State,
    check_gradient,
    parameter_name,
    saved_tensor,
)
from graphfsdp.optim.fused.update import (
    StepTensors,
    adam_coefficients,
    adam_update_,
    make_columns,
    taken_back,
)

_ADJUSTMENTS = ("original", "match_rms_adamw")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class _Member(NamedTuple):
    param: Tensor  # maybe a DTensor
    weight: Tensor  # this rank's rows of it
    grad: Tensor | None  # None where another rank may have rows with one
    state: dict[str, Tensor]  # this rank's part
    row: int  # group, as row of the hyper-parameter table


def _read(group: Mapping[str, Any]) -> Row:
    first, second = (group["momentum"], 0.0) if group["use_muon"] else group["betas"]
    return group["lr"], first, second, group["eps"], group["weight_decay"]


def _check(group: Mapping[str, Any], row: int) -> None:
    if not group["use_muon"]:
        check_betas(group, row)
        return
    check_number("momentum", group["momentum"], f"of parameter group {row}", below_one=True)
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, group[name], f"of parameter group {row}")


_RULE = Rule(_read, _check)


class Muon(LiveOptimizer):
    """torch.optim.Muon with live numbers, and AdamW for what is no matrix of a hidden layer.

    A group with ``use_muon=False`` (embeddings, norms, biases, the output layer) is stepped by
    AdamW with the group's ``betas``; all others must hold matrices. Sharded matrices are gathered
    for the orthogonalisation, all of them in one collective, in bfloat16.

    State per parameter: ``momentum_buffer`` [A, B]; of AdamW ``step`` [] float32, ``exp_avg`` and
    ``exp_avg_sq`` [...]. A sharded parameter whose gradient is missing counts as one of zeros.
    """

    _rule = _RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        """Set up the optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            lr: Learning rate.
            weight_decay: Fraction of the weight removed per unit of learning rate.
            momentum: Share of the old momentum in the new one.
            nesterov: Look ahead along the momentum.
            ns_coefficients: Of the Newton-Schulz polynomial.
            eps: The smallest norm to divide by; of AdamW, added to the root of the second moment.
            ns_steps: Newton-Schulz iterations.
            adjust_lr_fn: How lr follows the shape: "original" (also None), or "match_rms_adamw",
                with which lr and decay of AdamW can be kept.
            betas: Decay rates of AdamW's moments, for groups with ``use_muon=False``.

        Raises:
            ConfigError: a number is out of its range, or a parameter cannot be trained.
        """
        if adjust_lr_fn is not None and adjust_lr_fn not in _ADJUSTMENTS:
            raise ConfigError(f"adjust_lr_fn must be one of {_ADJUSTMENTS}, got {adjust_lr_fn!r}")
        if not 1 <= ns_steps < 100 or len(ns_coefficients) != 3:
            raise ConfigError(
                "expected three ns_coefficients and from 1 to 99 ns_steps, got "
                f"{ns_coefficients} and {ns_steps}"
            )
        self._nesterov = nesterov
        self._coefficients = tuple(ns_coefficients)
        self._num_steps = ns_steps
        self._adjust = adjust_lr_fn or "original"
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "eps": eps,
            "betas": betas,
            "use_muon": True,
        }
        super().__init__(params, defaults, StepControl())

    def _check_params(self, row: int) -> None:
        super()._check_params(row)
        group = self.param_groups[row]
        for index, param in enumerate(group["params"] if group["use_muon"] else ()):
            name = parameter_name(self.param_groups)(row, index)
            if param.dim() != 2:
                raise ConfigError(
                    f"Muon makes matrices orthogonal, but {name} has the shape "
                    f"{tuple(param.shape)}. Remedy: a group with use_muon=False, which AdamW "
                    "steps on"
                )
            placements: Sequence[Any] = getattr(param, "placements", ())
            if not all(place.is_replicate() or place.is_shard() for place in placements):
                raise ConfigError(
                    f"Muon gathers rows and columns, but {name} is a DTensor with "
                    f"{tuple(placements)}; expected Shard or Replicate"
                )

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take the step, and take it back if the flag is set."""
        members = self._members()
        if found_inf is None:
            self._update(members, grad_scale)
            return
        written = [
            tensor for member in members for tensor in (member.weight, *member.state.values())
        ]
        with taken_back(found_inf, written):
            self._update(members, grad_scale)
        counter = self._control.skipped_steps
        counter.add_((found_inf != 0).to(counter.device))

    def _members(self) -> list[_Member]:
        """A sharded parameter without a gradient steps, too: another rank may have one."""
        found = []
        name_of = parameter_name(self.param_groups)
        for row, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                weight = local_part(param.detach())
                grad = None if param.grad is None else local_part(param.grad)
                if grad is None and not (is_dtensor(param) and param.requires_grad):
                    continue
                if grad is not None:
                    check_gradient(weight, grad, name_of(row, index))
                if not self.state.get(param):
                    self._refuse_in_capture()
                    self.create_missing([param])
                state = {key: local_part(value) for key, value in self.state[param].items()}
                found.append(_Member(param, weight, grad, state, row))
        return found

    def _new_states(self, params: Sequence[Tensor]) -> dict[Tensor, State]:
        is_matrix = {
            param: bool(group["use_muon"])
            for group in self.param_groups
            for param in group["params"]
        }
        return {param: _new_state(param, is_matrix[param]) for param in params}

    def _match_entries(self, saved: Saved) -> State:
        expected = self.state.get(saved.param) or self._new_states([saved.param])[saved.param]
        return {
            key: saved_tensor(saved.entries, key, tensor.shape, saved.name)
            for key, tensor in expected.items()
        }

    def _update(
        self,
        members: list[_Member],
        grad_scale: Tensor | None,  # [] float
    ) -> None:
        matrices: dict[torch.device, list[_Member]] = {}
        for member in members:
            if self.param_groups[member.row]["use_muon"]:
                matrices.setdefault(member.weight.device, []).append(member)
            elif member.grad is not None:
                row = self._hyper.on(member.weight.device)[member.row]
                _adam_step(member, row, grad_scale)
        for device, found in matrices.items():
            table = self._hyper.on(device)
            rows = [self._direction(member, table[member.row], grad_scale) for member in found]
            whole = gather_rows([member.param for member in found], rows)
            for member, matrix in zip(found, whole, strict=True):
                lr, _, _, eps, weight_decay = table[member.row].unbind()
                update = own_rows(
                    member.param, orthogonal(matrix, eps, self._coefficients, self._num_steps)
                )
                ratio = _shape_ratio(member.param.shape, self._adjust)
                wide = member.weight.to(torch.promote_types(member.weight.dtype, torch.float32))
                wide.mul_(1 - lr * weight_decay).sub_(update.to(wide.dtype) * (lr * ratio))
                if wide is not member.weight:
                    member.weight.copy_(wide)

    def _direction(self, member: _Member, row: Tensor, grad_scale: Tensor | None) -> Tensor:
        """Move the momentum, and return this rank's rows of what is to be made orthogonal."""
        buffer = member.state["momentum_buffer"]
        rest = 1 - row[1]
        grad = torch.zeros_like(buffer) if member.grad is None else member.grad.to(buffer.dtype)
        if grad_scale is not None:
            grad = grad * grad_scale
        buffer.add_((grad - buffer) * rest)
        found = buffer - (buffer - grad) * rest if self._nesterov else buffer
        return found.to(torch.bfloat16)


def _new_state(param: Tensor, is_matrix: bool) -> State:
    local = local_part(param.detach())
    dtype = torch.promote_types(local.dtype, torch.float32)

    def zeros() -> Tensor:
        return wrap_like(torch.zeros_like(local, dtype=dtype), param)

    if is_matrix:
        return {"momentum_buffer": zeros()}
    step = torch.zeros((), dtype=torch.float32, device=local.device)
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def orthogonal(
    matrix: Tensor,  # [A, B] bfloat16
    eps: Tensor,  # [] float
    coefficients: tuple[float, ...],
    num_steps: int,
) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near one.

    Capture: no host sync.
    Source: Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / torch.maximum(found.norm(), eps.to(found.dtype))
    for _ in range(num_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def _adam_step(member: _Member, row: Tensor, grad_scale: Tensor | None) -> None:
    assert member.grad is not None
    step = member.state["step"].add_(1)
    moments = member.state["exp_avg"], member.state["exp_avg_sq"]
    flags = Flags()
    part = make_columns([StepTensors(member.weight, member.grad, *moments)])
    adam_update_(part, adam_coefficients(row, step, flags), flags, grad_scale=grad_scale)


def _shape_ratio(shape: torch.Size, adjustment: str) -> float:
    """Return what lr is multiplied by.

    Source: as above; for "match_rms_adamw" Liu et al. 2025 (arXiv:2502.16982), equation 4.
    """
    num_rows, num_columns = shape
    if adjustment == "original":
        return math.sqrt(max(1.0, num_rows / max(1, num_columns)))
    return 0.2 * math.sqrt(max(num_rows, num_columns))


Ranges = list[tuple[int, int]]  # where each rank's part begins along a dim, and how long it is


@dataclass(frozen=True)
class Cut:
    """How one axis cuts what earlier ones left of a matrix: ``dim`` 0 by rows, 1 by columns."""

    group: dist.ProcessGroup
    dim: int
    ranges: Ranges


def cuts_of(param: Tensor) -> list[Cut]:
    """Return how a DTensor is cut, axis by axis in the order of cutting; none for a plain one."""
    if not is_dtensor(param):
        return []
    dtensor: Any = param
    sizes, found = list(param.shape), []
    for axis, place in enumerate(dtensor.placements):
        if place.is_replicate():
            continue
        group = dtensor.device_mesh.get_group(axis)
        ranges = _ranges(place, sizes[place.dim], group.size())
        found.append(Cut(group, place.dim, ranges))
        sizes[place.dim] = ranges[group.rank()][1]
    return found


def _ranges(place: Any, size: int, num_ranks: int) -> Ranges:
    rows_of = getattr(place, "rows_of", None)  # fully_shard's own placement
    if rows_of is not None:
        return [rows_of(rank) for rank in range(num_ranks)]
    chunk = -(-size // num_ranks)  # torch.chunk's
    firsts = [min(rank * chunk, size) for rank in range(num_ranks)]
    return [(first, min(chunk, size - first)) for first in firsts]


def gather_rows(
    params: Sequence[Tensor],  # [A, B] each, DTensors or plain
    parts: Sequence[Tensor],  # [rows here, columns here] each, of one dtype and device
) -> list[Tensor]:
    """Return the whole matrices, [A, B] each; what no rank shares is returned as it is.

    Capture: no host sync; one collective for each group of ranks.
    """
    found = list(parts)
    waiting = [cuts_of(param) for param in params]
    while any(waiting):
        # The last cut is undone first.
        by_group: dict[dist.ProcessGroup, list[tuple[int, Cut]]] = {}
        for index, cuts in enumerate(waiting):
            if cuts:
                cut = cuts.pop()
                by_group.setdefault(cut.group, []).append((index, cut))
        for group, members in by_group.items():
            whole = _gather_group(
                [found[index] for index, _ in members], [cut for _, cut in members], group
            )
            for (index, _), matrix in zip(members, whole, strict=True):
                found[index] = matrix
    return found


def own_rows(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole matrix, a view."""
    for cut in cuts_of(param):
        first, length = cut.ranges[cut.group.rank()]
        whole = whole.narrow(cut.dim, first, length)
    return whole


def _gather_group(
    parts: Sequence[Tensor], cuts: Sequence[Cut], group: dist.ProcessGroup
) -> list[Tensor]:
    num_ranks, here = group.size(), group.rank()
    # Where each matrix begins among the parts of each rank.
    shapes = [
        [_piece_shape(part, cut, rank) for rank in range(num_ranks)]
        for part, cut in zip(parts, cuts, strict=True)
    ]
    starts = [
        [0, *accumulate(math.prod(of_ranks[rank]) for of_ranks in shapes)]
        for rank in range(num_ranks)
    ]
    shard_numel = max(start[-1] for start in starts)
    packed = torch.zeros(shard_numel, dtype=parts[0].dtype, device=parts[0].device)
    packed[: starts[here][-1]].copy_(torch.cat([part.reshape(-1) for part in parts]))
    everyone = torch.empty(num_ranks * shard_numel, dtype=packed.dtype, device=packed.device)
    all_gather_(everyone, packed, group)
    return [
        torch.cat(
            [
                everyone.narrow(
                    0,
                    rank * shard_numel + starts[rank][index],
                    math.prod(shapes[index][rank]),
                ).view(shapes[index][rank])
                for rank in _in_order(cut.ranges)
            ],
            dim=cut.dim,
        )
        for index, cut in enumerate(cuts)
    ]


def _piece_shape(part: Tensor, cut: Cut, rank: int) -> list[int]:
    shape = list(part.shape)
    shape[cut.dim] = cut.ranges[rank][1]
    return shape


def _in_order(ranges: Ranges) -> list[int]:
    return sorted(range(len(ranges)), key=lambda rank: ranges[rank])
