"""One call of the fused operation: its tensors in lanes, neighbours merged into flat runs.

Shapes: G = groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.optim.fused import step_kernel
from graphfsdp.optim.fused.flat_runs import flat_view, is_dense, merge_neighbours, same_layout
from graphfsdp.optim.fused.scaled_moments import scale_of
from graphfsdp.optim.fused.step_cpu import scratch_bytes
from graphfsdp.optim.fused.step_state import State
from graphfsdp.optim.fused.step_tensors import Columns, Dtypes, StepTensors, make_columns

# Where a state is not called as its column is.
_COLUMN_OF_STATE: Mapping[str, str] = MappingProxyType(
    {
        "master_param": "main_param",
        "momentum_buffer": "exp_avg",
        scale_of("momentum_buffer"): scale_of("exp_avg"),
    }
)


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
class Batch:
    """One call of the operation: all parameters of one device and dtype combination.

    Attributes:
        columns: All tensors, neighbours merged.
        grad_indices: Place of each gradient among all parameters.
        merged: Gradients are merged too; otherwise they are taken from the parameters at each
            step, because every backward makes new ones.
        steps: 1-D views of all step counts.
        lanes: See Note [Lanes].
        hyper: [G, 5] float64, the hyper-parameter table.
        tables: Those of the kernel, if it is used.
        dense: No tensor has gaps.
        scratch_bytes: What a step that scales gradients needs besides, on a CPU.
        staged: Gradients that are strided unlike their parameter go through a copy that is not.
    """

    columns: Columns
    grad_indices: list[int]
    merged: bool
    steps: list[Tensor]
    lanes: "Lanes"
    hyper: Tensor
    tables: list[Tensor]
    dense: bool
    scratch_bytes: int
    staged: list[tuple[int, Tensor]] = field(default_factory=list)


class Lanes(NamedTuple):
    """What tells the lanes of a batch apart; see Note [Lanes]."""

    rows: list[int]
    sizes: list[int]
    steps: list[int]


def combination(member: Member) -> tuple[object, ...]:
    """Return what is equal for parameters that go into one batch."""
    return (member.param.device, _dtypes(member), _is_dense(member))


def _dtypes(member: Member) -> Dtypes:
    return make_columns([_tensors(member)]).dtypes()


def _is_dense(member: Member) -> bool:
    param = member.param
    return is_dense(param.shape, param.stride())


def _uses_kernel(member: Member) -> bool:
    return (
        _on_cuda(member.param)
        and _is_dense(member)
        and step_kernel.is_available()
        and step_kernel.supports(_dtypes(member))
    )


def _on_cuda(param: Tensor) -> bool:
    return param.is_cuda


def _on_cpu(member: Member) -> bool:
    return member.param.device.type == "cpu"


def _tensors(member: Member) -> StepTensors:
    state = {
        _COLUMN_OF_STATE.get(key, key): value
        for key, value in member.state.items()
        if key != "step"
    }
    return StepTensors(member.param, member.grad, **state)


def make_batch(
    members: list[Member],  # of one combination
    hyper: Tensor,  # [G, 5] float64
) -> Batch:
    """Sort parameters into lanes, merge neighbours, and build the kernel's tables.

    Capture: allocates and copies from the host: never inside a capture.
    """
    dense = _is_dense(members[0])
    staged = _staging_copies(members) if dense else {}
    by_lane: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        grad = staged.get(member.position, member.grad)
        lane = by_lane.setdefault((member.row, member.step_class), [])
        lane.append(member._replace(grad=grad))

    found: list[StepTensors] = []
    grad_indices: list[int] = []
    steps: list[Tensor] = []
    lanes = Lanes([], [], [])
    for (row, _), lane in by_lane.items():
        runs = _merge_lane(lane, dense)
        found += [tensors for _, tensors in runs]
        grad_indices += [position for position, _ in runs]
        lanes.rows.append(row)
        lanes.sizes.append(len(runs))
        lanes.steps.append(len(steps))
        steps += _step_slices([member.state["step"] for member in lane])
    columns = make_columns(found)
    merged = len(found) < sum(1 for member in members if member.param.numel())
    return Batch(
        columns=columns if merged else columns._replace(grads=[]),
        grad_indices=grad_indices,
        merged=merged,
        steps=steps,
        lanes=lanes,
        hyper=hyper,
        tables=_make_tables(found, steps, lanes, hyper) if _uses_kernel(members[0]) else [],
        dense=dense,
        scratch_bytes=scratch_bytes(columns, lanes.sizes) if dense and _on_cpu(members[0]) else 0,
        staged=list(staged.items()),
    )


def _staging_copies(members: list[Member]) -> dict[int, Tensor]:
    """Return empty gradients that are strided as their parameter, where theirs are not."""
    return {
        member.position: torch.empty_strided(
            member.param.shape,
            member.param.stride(),
            dtype=member.grad.dtype,
            device=member.grad.device,
        )
        for member in members
        if not same_layout(member.grad, member.param)
    }


def _merge_lane(lane: list[Member], dense: bool) -> list[tuple[int, StepTensors]]:
    """Return the runs of a lane, each with the place of its first gradient; none are empty.

    They are in the order of the parameters: wherever the allocator has put these, the call is the
    same, and gradients that follow one another in memory do so in the call.
    """
    found = [_tensors(member) for member in lane]
    # The blocks of scales start where a parameter does.
    if not dense or found[0].is_scaled:
        return [
            (member.position, tensors)
            for member, tensors in zip(lane, found, strict=True)
            if member.param.numel()
        ]
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
    return list(step_kernel.make_tables(runs, lane_of_run, firsts, hyper.device))


def _step_slices(steps: list[Tensor]) -> list[Tensor]:
    """Return 1-D views that cover these [] step counts, neighbours in one view."""
    return [
        flat_view(steps[run.members[0]], len(run.members))
        for run in merge_neighbours([(step,) for step in steps])
    ]


def collect(batch: Batch, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that the batch reads now.

    Capture: copies gradients that are strided unlike their parameter; no host sync.
    """
    staged = dict(batch.staged)
    for index, copy in batch.staged:
        source = grads[index]
        assert source is not None, "the plan's signature says that it has a gradient"
        copy.copy_(source)
    if batch.merged:
        return batch.columns.grads
    found = [staged.get(index, grads[index]) for index in batch.grad_indices]
    return [grad for grad in found if grad is not None]
