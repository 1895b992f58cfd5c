"""The plan of a fused step: which tensors go into which call of the fused operation.

A plan is made when the set of gradients, their dtypes or an address changes, so in warm-up, and
is only followed afterwards.

Shapes: G = groups.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.optim.fused import kernel
from graphfsdp.optim.fused.checks import (
    check_devices,
    check_gradient,
    check_state,
    parameter_name,
)
from graphfsdp.optim.fused.control import NormParts, norm_parts
from graphfsdp.optim.fused.flat_runs import flat_view, is_dense, merge_neighbours, same_layout
from graphfsdp.optim.fused.settings import Flags, StepSettings
from graphfsdp.optim.fused.state import State
from graphfsdp.optim.fused.step import fused_adam_
from graphfsdp.optim.fused.storage import Columns, Dtypes, StepTensors, make_columns

# Where a state is not called as its column is.
_COLUMN_OF_STATE: Mapping[str, str] = MappingProxyType({"master_param": "main_param"})


class Stepped(NamedTuple):
    position: int  # among all parameters of the optimizer
    row: int  # its group, as row of the hyper-parameter table
    param: Tensor
    grad: Tensor  # this rank's part


class Member(NamedTuple):
    """One parameter that takes the step; of a DTensor, this rank's part of everything."""

    position: int
    tensors: StepTensors
    step: Tensor  # [] float32
    lane: tuple[int, int]  # row, and a number that parameters with equal step counts share
    dense: bool  # neither parameter nor gradient has gaps, and they are strided alike


class Lanes(NamedTuple):
    """What tells the lanes of a batch apart; see Note [Lanes]."""

    rows: list[int]
    sizes: list[int]
    steps: list[int]


@dataclass(frozen=True)
class Batch:
    """One call of the operation: all parameters of one device and dtype combination."""

    columns: Columns  # neighbours merged
    grad_indices: list[int]  # place of each gradient among all parameters
    # Gradients are merged too; otherwise they are taken from the parameters at each step, because
    # every backward makes new ones.
    merged: bool
    steps: list[Tensor]  # 1-D views of all step counts
    lanes: Lanes
    hyper: Tensor  # [G, 5] float64
    tables: list[Tensor]  # of the kernel, if it is used
    dense: bool  # see Member

    def collect(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        if self.merged:
            return self.columns.grads
        return [grad for index in self.grad_indices if (grad := grads[index]) is not None]


class Plan:
    """Batches of parameters, and the facts under which they hold."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        stepped: Sequence[Stepped],
        states: Mapping[Tensor, State],
        classes: Mapping[Tensor, int],
        hyper: Callable[[torch.device], Tensor],  # gives the hyper-parameter table of a device
    ) -> None:
        """Capture: allocates and copies from the host: never inside a capture."""
        self._signature = _signature(grads)
        self._params = [local_part(param) for param in params]
        self._states = list(states.values())
        self._state_tensors = _values(self._states)
        combinations: dict[tuple[object, ...], list[Member]] = {}
        for item in stepped:
            member = _member(item, local_state(states[item.param]), classes[item.param])
            key = (member.tensors.param.device, _dtypes(member), member.dense)
            combinations.setdefault(key, []).append(member)
        self._batches = [
            _make_batch(members, hyper(members[0].tensors.param.device))
            for members in combinations.values()
        ]
        # Addresses of gradients matter where something was derived from them.
        self._watch_grads = any(batch.tables or batch.merged for batch in self._batches)
        self._addresses = self._current_addresses(grads)

    def holds(self, grads: Sequence[Tensor | None], states: Iterable[State]) -> bool:
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
        found_inf: Tensor | None,  # [] float
        skipped: Tensor,  # [] float32
        flags: Flags,
    ) -> None:
        """Capture: one operation per device and dtype combination; no host sync."""
        for index, batch in enumerate(self._batches):
            device = batch.hyper.device
            counts = index == 0 and found_inf is not None
            fused_adam_(
                *batch.columns._replace(grads=batch.collect(grads)),
                batch.steps,
                batch.hyper,
                *batch.lanes,
                _on(device, grad_scale),
                _on(device, found_inf),
                skipped if counts else None,
                batch.tables,
                batch.dense,
                *flags,
            )

    def norm_parts(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> NormParts:
        """Return the tensors whose norm is the gradients': flat runs where there are such."""
        parts = norm_parts(params, grads)
        if parts.sharded:
            return parts
        runs = [
            run
            for batch in self._batches
            for run in zip(batch.grad_indices, batch.collect(grads), strict=True)
        ]
        # Not in the order of addresses, in which sums would round otherwise from run to run.
        return NormParts([grad for _, grad in sorted(runs, key=operator.itemgetter(0))], {})

    @property
    def device(self) -> torch.device | None:
        """Where the first call of the operation runs; None where there is no call."""
        return self._batches[0].hyper.device if self._batches else None

    def _current_addresses(self, grads: Sequence[Tensor | None]) -> list[int]:
        addresses = [param.data_ptr() for param in self._params]
        if self._watch_grads:
            addresses += [grad.data_ptr() for grad in grads if grad is not None]
        return addresses


def find_stepped(
    groups: Sequence[Mapping[str, Any]],
    grads: Sequence[Tensor | None],
    states: Mapping[Tensor, State],
    settings: StepSettings,
) -> list[Stepped]:
    """Return the parameters with a gradient; refuse gradients and states that cannot be used."""
    check_devices(groups, settings)
    name_of = parameter_name(groups)
    found = []
    index = 0
    for row, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            grad = grads[index]
            if grad is not None:
                name = name_of(row, position)
                check_gradient(local_part(param), grad, name)
                if states.get(param):
                    check_state(param, local_state(states[param]), name, settings)
                found.append(Stepped(index, row, param, grad))
            index += 1
    return found


def gradients_of(params: Sequence[Tensor], *, decoupled: bool) -> list[Tensor | None]:
    """Return the gradient that each parameter has now, this rank's part of a DTensor's."""
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


def _member(item: Stepped, state: State, step_class: int) -> Member:
    param = local_part(item.param)
    named = {_COLUMN_OF_STATE.get(key, key): value for key, value in state.items() if key != "step"}
    dense = is_dense(param.shape, param.stride()) and same_layout(param, item.grad)
    tensors = StepTensors(param, item.grad, **named)
    return Member(item.position, tensors, state["step"], (item.row, step_class), dense)


def _dtypes(member: Member) -> Dtypes:
    return make_columns([member.tensors]).dtypes()


def _make_batch(
    members: list[Member],  # of one device and dtype combination
    hyper: Tensor,  # [G, 5] float64
) -> Batch:
    by_lane: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        by_lane.setdefault(member.lane, []).append(member)
    found: list[StepTensors] = []
    grad_indices: list[int] = []
    steps: list[Tensor] = []
    lanes = Lanes([], [], [])
    for (row, _), lane in by_lane.items():
        runs = _merge_lane(lane)
        found += [tensors for _, tensors in runs]
        grad_indices += [position for position, _ in runs]
        lanes.rows.append(row)
        lanes.sizes.append(len(runs))
        lanes.steps.append(len(steps))
        steps += _step_slices([member.step for member in lane])
    columns = make_columns(found)
    merged = len(found) < sum(1 for member in members if member.tensors.param.numel())
    return Batch(
        columns=columns if merged else columns._replace(grads=[]),
        grad_indices=grad_indices,
        merged=merged,
        steps=steps,
        lanes=lanes,
        hyper=hyper,
        tables=_make_tables(found, steps, lanes, hyper) if _uses_kernel(members[0]) else [],
        dense=members[0].dense,
    )


def _uses_kernel(member: Member) -> bool:
    return (
        _on_cuda(member.tensors.param)
        and member.dense
        and kernel.is_available()
        and kernel.supports(_dtypes(member))
    )


def _on_cuda(param: Tensor) -> bool:
    return param.is_cuda


def _merge_lane(lane: list[Member]) -> list[tuple[int, StepTensors]]:
    """Return the runs of a lane, each with the place of its first gradient; none are empty.

    They are in the order of the parameters: wherever the allocator has put these, the call is the
    same, and gradients that follow one another in memory do so in the call.
    """
    found = [member.tensors for member in lane]
    if not lane[0].dense:
        return [(m.position, m.tensors) for m in lane if m.tensors.param.numel()]
    return [
        (
            lane[run.members[0]].position,
            # Run of one parameter: the tensors themselves, so that views need not be made.
            found[run.members[0]] if len(run.members) == 1 else StepTensors(*run.tensors),  # type: ignore[arg-type]
        )
        for run in sorted(merge_neighbours(found), key=lambda run: run.members[0])
    ]


def _make_tables(
    runs: list[StepTensors], steps: list[Tensor], lanes: Lanes, hyper: Tensor
) -> list[Tensor]:
    if not runs:
        return []
    lane_of_run = [lane for lane, size in enumerate(lanes.sizes) for _ in range(size)]
    firsts = [(steps[first], row) for first, row in zip(lanes.steps, lanes.rows, strict=True)]
    return list(kernel.make_tables(runs, lane_of_run, firsts, hyper.device))


def _step_slices(steps: list[Tensor]) -> list[Tensor]:
    """Return 1-D views that cover these [] step counts, neighbours in one view."""
    return [
        flat_view(steps[run.members[0]], len(run.members))
        for run in merge_neighbours([(step,) for step in steps])
    ]


def _on(device: torch.device, scalar: Tensor | None) -> Tensor | None:
    if scalar is None or scalar.device == device:
        return scalar
    return scalar.to(device, non_blocking=True)


def _values(states: Sequence[State]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def _identical(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


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
