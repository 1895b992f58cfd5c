"""The plan of FusedAdam's step: which tensors go into which call of the fused operation.

A plan is made when the set of gradients, their dtypes or an address changes, so in warm-up, and
is only followed afterwards.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.dtensors import is_dtensor, local_part
from graphfsdp.optim import adam_kernel
from graphfsdp.optim.adam_op import fused_adam_
from graphfsdp.optim.adam_state import State
from graphfsdp.optim.flat_runs import (
    Bundle,
    flat_view,
    is_dense,
    merge_neighbours,
    same_layout,
)


class Flags(NamedTuple):
    """Settings of the optimizer that hold for all groups."""

    adam_w_mode: bool
    bias_correction: bool


class Member(NamedTuple):
    """One parameter that takes the step; of a DTensor, this rank's part of everything.

    Attributes:
        position: Place among all parameters of the optimizer.
        param: Model weight.
        grad: Its gradient.
        state: Its state tensors.
        row: Group, as row of the hyper-parameter table.
        step_class: Equal for parameters whose step counts are equal.
    """

    position: int
    param: Tensor
    grad: Tensor
    state: State
    row: int
    step_class: int


@dataclass
class _Batch:
    """One call of the operation: all parameters of one device and dtype combination."""

    params: list[Tensor]
    # None: taken from the parameters at each step, because every backward makes new ones.
    grads: list[Tensor] | None
    grad_indices: list[int]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    main_params: list[Tensor]
    steps: list[Tensor]
    lane_rows: list[int]
    lane_sizes: list[int]
    lane_steps: list[int]
    hyper: Tensor
    tables: list[Tensor]
    dense: bool
    # Gradients that are strided unlike their parameter go through a copy that is not.
    staged: list[tuple[int, Tensor]] = field(default_factory=list)


class Plan:
    """Batches of parameters, and the facts under which they hold."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        members: Sequence[Member],
        states: Iterable[State],
        hyper: Callable[[torch.device], Tensor],
    ) -> None:
        """Make the plan.

        Args:
            params: All parameters of the optimizer.
            grads: The gradient of each, or None.
            members: Those that have a gradient.
            states: The state of every parameter that has any.
            hyper: Gives the hyper-parameter table of a device.

        Capture: allocates and copies from the host: never inside a capture.
        """
        self._signature = _signature(grads)
        self._params = [local_part(param) for param in params]
        self._states = list(states)
        self._state_tensors = _values(self._states)
        combinations: dict[tuple[object, ...], list[Member]] = {}
        for member in members:
            combinations.setdefault(_combination(member), []).append(member)
        self._batches = [
            _make_batch(batch, hyper(batch[0].param.device)) for batch in combinations.values()
        ]
        # Addresses of gradients matter where something was derived from them.
        self._watch_grads = any(batch.tables or batch.grads is not None for batch in self._batches)
        self._addresses = self._current_addresses(grads)

    def holds(self, grads: Sequence[Tensor | None], states: Iterable[State]) -> bool:
        """Return whether the plan still fits: gradients, addresses, and state tensors."""
        states = list(states)
        return (
            _signature(grads) == self._signature
            and self._current_addresses(grads) == self._addresses
            and _identical(states, self._states)
            and _identical(_values(states), self._state_tensors)
        )

    def run(
        self,
        grads: Sequence[Tensor | None],
        grad_scale: Tensor | None,  # [] float
        flags: Flags,
    ) -> None:
        """Take the step.

        Capture: one operation per device and dtype combination; no host sync.
        """
        for batch in self._batches:
            scale = grad_scale
            if scale is not None and scale.device != batch.hyper.device:
                scale = scale.to(batch.hyper.device, non_blocking=True)
            fused_adam_(
                batch.params,
                _collect(batch, grads),
                batch.exp_avgs,
                batch.exp_avg_sqs,
                batch.main_params,
                batch.steps,
                batch.hyper,
                batch.lane_rows,
                batch.lane_sizes,
                batch.lane_steps,
                scale,
                batch.tables,
                batch.dense,
                flags.adam_w_mode,
                flags.bias_correction,
            )

    def _current_addresses(self, grads: Sequence[Tensor | None]) -> list[int]:
        addresses = [param.data_ptr() for param in self._params]
        if self._watch_grads:
            addresses += [grad.data_ptr() for grad in grads if grad is not None]
        return addresses


def _values(states: Sequence[State]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def _identical(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def gradients_of(params: Sequence[Tensor], *, decoupled: bool) -> list[Tensor | None]:
    """Return the gradient that each parameter has now, this rank's part of a DTensor's.

    Args:
        decoupled: Read ``decoupled_grad`` instead of ``grad``.
    """
    if decoupled:
        grads = [getattr(param, "decoupled_grad", None) for param in params]
    else:
        grads = [param.grad for param in params]
    if any(map(is_dtensor, params)):
        return [None if grad is None else local_part(grad) for grad in grads]
    return grads


def local_state(state: Mapping[str, Tensor]) -> State:
    """Return one parameter's state with this rank's part of each DTensor."""
    return {key: local_part(value) for key, value in state.items()}


def _signature(grads: Sequence[Tensor | None]) -> list[object] | None:
    """Return what the batches depend on; None for gradients that no plan can be made for."""
    try:
        # Shapes follow: autograd keeps param.grad in the parameter's shape, and a decoupled
        # gradient of another shape but equal strides has another number of elements.
        return [
            None if grad is None else (grad.dtype, grad.stride(), grad.numel()) for grad in grads
        ]
    except RuntimeError:  # sparse tensors have no strides
        return None


def _combination(member: Member) -> tuple[object, ...]:
    param = member.param
    main = member.state.get("master_param")
    return (
        param.device,
        param.dtype,
        member.grad.dtype,
        member.state["exp_avg"].dtype,
        None if main is None else main.dtype,
        _is_dense(member),
    )


def _is_dense(member: Member) -> bool:
    param = member.param
    return is_dense(param.shape, param.stride())


def _uses_kernel(member: Member) -> bool:
    main = member.state.get("master_param")
    return (
        _on_cuda(member.param)
        and _is_dense(member)
        and adam_kernel.is_available()
        and adam_kernel.supports(
            adam_kernel.Dtypes(
                member.param.dtype,
                member.grad.dtype,
                member.state["exp_avg"].dtype,
                None if main is None else main.dtype,
            )
        )
    )


def _on_cuda(param: Tensor) -> bool:
    return param.is_cuda


def _bundle(member: Member) -> Bundle:
    state = member.state
    return (
        member.param,
        member.grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        state.get("master_param"),
    )


def _make_batch(members: list[Member], hyper: Tensor) -> _Batch:
    dense = _is_dense(members[0])
    kernel = _uses_kernel(members[0])
    staged: dict[int, Tensor] = {}
    if dense:
        staged = {
            member.position: torch.empty_strided(
                member.param.shape,
                member.param.stride(),
                dtype=member.grad.dtype,
                device=member.grad.device,
            )
            for member in members
            if not same_layout(member.grad, member.param)
        }
        members = [
            member._replace(grad=staged.get(member.position, member.grad)) for member in members
        ]
    lanes: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        lanes.setdefault((member.row, member.step_class), []).append(member)

    bundles: list[Bundle] = []
    grad_indices: list[int] = []
    steps: list[Tensor] = []
    lane_sizes: list[int] = []
    lane_steps: list[int] = []
    for lane in lanes.values():
        found = [_bundle(member) for member in lane]
        if dense:
            runs = merge_neighbours(found)
            # Run of one parameter: the tensors themselves, so that views need not be made.
            bundles += [
                found[run.members[0]] if len(run.members) == 1 else run.tensors for run in runs
            ]
            grad_indices += [lane[run.members[0]].position for run in runs]
            lane_sizes.append(len(runs))
        else:
            filled = [i for i, bundle in enumerate(found) if lane[i].param.numel()]
            bundles += [found[i] for i in filled]
            grad_indices += [lane[i].position for i in filled]
            lane_sizes.append(len(filled))
        lane_steps.append(len(steps))
        steps += _step_slices([member.state["step"] for member in lane])
    lane_rows = [row for row, _ in lanes]
    columns = [[bundle[column] for bundle in bundles] for column in range(5)]
    params, grads, exp_avgs, exp_avg_sqs, main_params = (
        [tensor for tensor in column if tensor is not None] for column in columns
    )
    merged = len(bundles) < sum(1 for member in members if member.param.numel())
    tables: list[Tensor] = []
    if kernel and bundles:
        lane_of_run = [lane for lane, size in enumerate(lane_sizes) for _ in range(size)]
        lane_firsts = [
            (steps[first], row) for first, row in zip(lane_steps, lane_rows, strict=True)
        ]
        tables = list(adam_kernel.make_tables(bundles, lane_of_run, lane_firsts, hyper.device))
    return _Batch(
        params=params,
        grads=grads if merged else None,
        grad_indices=grad_indices,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        main_params=main_params,
        steps=steps,
        lane_rows=lane_rows,
        lane_sizes=lane_sizes,
        lane_steps=lane_steps,
        hyper=hyper,
        tables=tables,
        dense=dense,
        staged=list(staged.items()),
    )


def _step_slices(steps: list[Tensor]) -> list[Tensor]:
    """Return 1-D views that cover these [] step counts, neighbours in one view."""
    return [
        flat_view(steps[run.members[0]], len(run.members))
        for run in merge_neighbours([(step,) for step in steps])
    ]


def _collect(batch: _Batch, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that the batch reads now."""
    staged = dict(batch.staged)
    for index, copy in batch.staged:
        source = grads[index]
        assert source is not None, "the plan's signature says that it has a gradient"
        copy.copy_(source)
    if batch.grads is not None:
        return batch.grads
    found = [staged.get(index, grads[index]) for index in batch.grad_indices]
    return [grad for grad in found if grad is not None]


__all__ = ["Flags", "Member", "Plan", "gradients_of", "local_state"]
