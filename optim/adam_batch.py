"""One call of the fused operation: its tensors in lanes, neighbours merged into flat runs.

Shapes: G = groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from graphfsdp.optim import adam_kernel
from graphfsdp.optim.adam_state import State
from graphfsdp.optim.flat_runs import (
    Bundle,
    flat_view,
    is_dense,
    merge_neighbours,
    same_layout,
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
    """One call of the operation: all parameters of one device and dtype combination."""

    params: list[Tensor]
    # None: taken from the parameters at each step, because every backward makes new ones.
    grads: list[Tensor] | None
    grad_indices: list[int]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
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


def combination(member: Member) -> tuple[object, ...]:
    """Return what is equal for parameters that go into one batch."""
    return (member.param.device, _dtypes(member), _is_dense(member))


def _dtypes(member: Member) -> adam_kernel.Dtypes:
    return adam_kernel.Dtypes(
        *(None if tensor is None else tensor.dtype for tensor in _bundle(member))  # type: ignore[arg-type]
    )


def _is_dense(member: Member) -> bool:
    param = member.param
    return is_dense(param.shape, param.stride())


def _uses_kernel(member: Member) -> bool:
    return (
        _on_cuda(member.param)
        and _is_dense(member)
        and adam_kernel.is_available()
        and adam_kernel.supports(_dtypes(member))
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
        state.get("max_exp_avg_sq"),
        state.get("master_param"),
    )


def make_batch(
    members: list[Member],  # of one combination
    hyper: Tensor,  # [G, 5] float64
) -> Batch:
    """Sort parameters into lanes, merge neighbours, and build the kernel's tables.

    Capture: allocates and copies from the host: never inside a capture.
    """
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
    columns = zip(*bundles, strict=True) if bundles else [()] * len(adam_kernel.ADDRESSES)
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, main_params = (
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
    return Batch(
        params=params,
        grads=grads if merged else None,
        grad_indices=grad_indices,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        max_exp_avg_sqs=max_exp_avg_sqs,
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


def collect(batch: Batch, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that the batch reads now.

    Capture: copies gradients that are strided unlike their parameter; no host sync.
    """
    staged = dict(batch.staged)
    for index, copy in batch.staged:
        source = grads[index]
        assert source is not None, "the plan's signature says that it has a gradient"
        copy.copy_(source)
    if batch.grads is not None:
        return batch.grads
    found = [staged.get(index, grads[index]) for index in batch.grad_indices]
    return [grad for grad in found if grad is not None]


__all__ = ["Batch", "Member", "collect", "combination", "make_batch"]
