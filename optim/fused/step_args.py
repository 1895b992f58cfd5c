"""The arguments of one fused step, and its plain tensor code.

Shapes: G = groups; S = parameters that one tensor of step counts stands for.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.optim.fused.adam_math import adam_coefficients, adam_update_
from graphfsdp.optim.fused.step_settings import Flags
from graphfsdp.optim.fused.step_tensors import Columns

# Note [Lanes]
# A lane is a stretch of the tensor lists with one row of the hyper-parameter table and one step
# count. Lane i covers the next lane_sizes[i] tensors; its step counts are steps[lane_steps[i]] and
# the following ones up to the next lane's, all of which hold equal values.


class StepArgs(NamedTuple):
    """Arguments of ``graphfsdp::fused_adam_``; its schema has the columns one by one.

    Attributes:
        columns: All tensors of the parameters.
        steps: [S] float32, advanced by one, or by none where the step is skipped.
        hyper: [G, 5] float64.
        lane_rows: See Note [Lanes].
        lane_sizes: See Note [Lanes].
        lane_steps: See Note [Lanes].
        grad_scale: [] float, multiplies every gradient.
        found_inf: [] float; unless it is zero, the step is skipped.
        skipped: [] float32, grows by one where the step is skipped; None: another call counts.
        tables: Device tables of the kernel; empty: tensor code.
        scratch: [scratch_bytes] uint8 memory for scaled gradients; None: the step makes its own.
        scratch_bytes: What it would be of use to have.
        dense: No tensor has gaps.
        adam_w_mode: See ``Flags``, as the rest.
        bias_correction: See there.
        maximize: See there.
        te_math: See there.
        rule: See there.
        nesterov: See there.
    """

    columns: Columns
    steps: list[Tensor]
    hyper: Tensor
    lane_rows: list[int]
    lane_sizes: list[int]
    lane_steps: list[int]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    skipped: Tensor | None
    tables: list[Tensor]
    scratch: Tensor | None
    scratch_bytes: int
    dense: bool
    adam_w_mode: bool
    bias_correction: bool
    maximize: bool
    te_math: bool
    rule: str
    nesterov: bool

    @property
    def flags(self) -> Flags:
        """The settings that change the update rule."""
        fields = self._asdict()
        return Flags(**{name: fields[name] for name in Flags._fields})


SCHEMA = (
    "fused_adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] main_params, "
    "Tensor(h!)[] exp_avg_scales, Tensor(i!)[] exp_avg_sq_scales, "
    "Tensor(j!)[] max_exp_avg_sq_scales, "
    "Tensor(f!)[] steps, Tensor hyper, int[] lane_rows, int[] lane_sizes, int[] lane_steps, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor(g!)? skipped, Tensor[] tables, "
    "Tensor(k!)? scratch, int scratch_bytes, bool dense, bool adam_w_mode, "
    "bool bias_correction, bool maximize, bool te_math, str rule, bool nesterov) -> ()"
)


def as_kernel(run: Callable[[StepArgs], None]) -> Callable[..., None]:
    """Return a function with the operation's flat arguments."""

    def kernel(*args: Any) -> None:
        num_columns = len(Columns._fields)
        run(StepArgs(Columns(*args[:num_columns]), *args[num_columns:]))

    return kernel


def advance(args: StepArgs) -> None:
    """Count the step, or the skip, on the device.

    Capture: no host sync.
    """
    if args.found_inf is None:
        torch._foreach_add_(args.steps, 1)
        return
    skip = (args.found_inf != 0).to(torch.float32)
    torch._foreach_add_(args.steps, 1 - skip)
    if args.skipped is not None:
        args.skipped.add_(skip)


def run_tensor_code(
    args: StepArgs, cut: Callable[[Columns], Iterable[Columns]] = lambda columns: (columns,)
) -> None:
    """Run the step as plain tensor code.

    Args:
        args: The step.
        cut: Cuts the tensors of a lane into parts that are updated one after the other.

    Capture: no host sync.
    """
    advance(args)
    start = 0
    for row, size, first in zip(args.lane_rows, args.lane_sizes, args.lane_steps, strict=True):
        coefficients = adam_coefficients(args.hyper[row], args.steps[first].view(-1)[0], args.flags)
        for part in cut(args.columns.part(start, start + size)):
            for index in range(len(part.params)):
                adam_update_(
                    part.member(index),
                    coefficients,
                    args.flags,
                    grad_scale=args.grad_scale,
                    found_inf=args.found_inf,
                )
        start += size
