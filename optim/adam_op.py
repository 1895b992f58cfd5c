"""The operation ``graphfsdp::fused_adam_``: one Adam step of many parameters as one node.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run; G = groups;
S = parameters that one tensor of step counts stands for.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from graphfsdp.optim import adam_kernel
from graphfsdp.optim.adam_math import adam_coefficients, adam_update_
from graphfsdp.optim.flat_runs import flat_view

# Note [Lanes]
# A lane is a stretch of the tensor lists with one row of the hyper-parameter table and one step
# count. Lane i covers the next lane_sizes[i] tensors; its step counts are steps[lane_steps[i]] and
# the following ones up to the next lane's, all of which hold equal values.

# A registration lives as long as its library object.
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")
_LIBRARY.define(
    "fused_adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] main_params, Tensor(e!)[] steps, Tensor hyper, "
    "int[] lane_rows, int[] lane_sizes, int[] lane_steps, Tensor? grad_scale, Tensor[] tables, "
    "bool dense, bool adam_w_mode, bool bias_correction) -> ()"
)

# Elements that are widened or scaled at a time: few enough for the copies (4 MiB each) to stay in
# the last-level cache, many enough for the overhead of a call not to count.
_CHUNK_NUMEL = 1 << 20


def _fused_adam_cpu(
    params: list[Tensor],  # [...] float, model weights, written
    grads: list[Tensor],  # [...] any float, read only
    exp_avgs: list[Tensor],  # [...] float32, updated in place
    exp_avg_sqs: list[Tensor],  # [...] float32, updated in place
    main_params: list[Tensor],  # [...] float32, updated in place; empty: there are none
    steps: list[Tensor],  # [S] float32, advanced by one
    hyper: Tensor,  # [G, 5] float64
    lane_rows: list[int],
    lane_sizes: list[int],
    lane_steps: list[int],
    grad_scale: Tensor | None,  # [] float, multiplies every gradient
    tables: list[Tensor],
    dense: bool,
    adam_w_mode: bool,
    bias_correction: bool,
) -> None:
    """Run the step with torch's vectorised kernels, or as tensor code where tensors have gaps.

    The table and the scale are read on the host, which is free here and happens anew each time
    the node runs.
    """
    if not dense:
        _fused_adam_tensor_code(
            params, grads, exp_avgs, exp_avg_sqs, main_params, steps, hyper, lane_rows,
            lane_sizes, lane_steps, grad_scale, tables, dense, adam_w_mode,
            bias_correction,
        )  # fmt: skip
        return
    torch._foreach_add_(steps, 1)
    if not params:  # all are of zero size
        return
    rows = hyper.tolist()
    scale = 1.0 if grad_scale is None else grad_scale.item()
    kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
    weights = main_params or params
    wide_dtype = exp_avgs[0].dtype
    scratch: Tensor | None = None
    if scale != 1.0 or grads[0].dtype != wide_dtype:
        numel = min(_CHUNK_NUMEL, sum(grad.numel() for grad in grads))
        scratch = torch.empty(numel, dtype=wide_dtype)
    whole = scratch is None and not main_params and params[0].dtype == wide_dtype
    start = 0
    for row, size, first in zip(lane_rows, lane_sizes, lane_steps, strict=True):
        if not size:
            continue
        lr, beta1, beta2, eps, weight_decay = rows[row]
        # With infinitely many steps behind it, a moment needs no correction: beta**inf is 0.
        step = steps[first].view(-1)[0] if bias_correction else torch.tensor(torch.inf)
        stop = start + size
        lists = [column[start:stop] for column in (weights, grads, exp_avgs, exp_avg_sqs, params)]
        start = stop
        for weight, grad, first_moment, second_moment, model in (
            [lists] if whole else _chunks(lists, _CHUNK_NUMEL)
        ):
            wide = _widen(weight, wide_dtype)
            gradient = _scaled(grad, scale, scratch)
            kernel(
                wide, gradient, first_moment, second_moment, [], [step] * len(wide),
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            if main_params or wide is not weight:
                torch._foreach_copy_(model, wide)


def _fused_adam_tensor_code(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    main_params: list[Tensor],
    steps: list[Tensor],
    hyper: Tensor,
    lane_rows: list[int],
    lane_sizes: list[int],
    lane_steps: list[int],
    grad_scale: Tensor | None,
    tables: list[Tensor],
    dense: bool,
    adam_w_mode: bool,
    bias_correction: bool,
) -> None:
    """Run the step as plain tensor code; arguments as in ``_fused_adam_cpu``."""
    torch._foreach_add_(steps, 1)
    index = 0
    for row, size, first in zip(lane_rows, lane_sizes, lane_steps, strict=True):
        step = steps[first].view(-1)[0]
        coefficients = adam_coefficients(hyper[row], step, bias_correction=bias_correction)
        for _ in range(size):
            adam_update_(
                params[index],
                grads[index],
                exp_avgs[index],
                exp_avg_sqs[index],
                coefficients,
                main_param=main_params[index] if main_params else None,
                grad_scale=grad_scale,
                adam_w_mode=adam_w_mode,
            )
            index += 1


def _fused_adam_cuda(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    main_params: list[Tensor],
    steps: list[Tensor],
    hyper: Tensor,
    lane_rows: list[int],
    lane_sizes: list[int],
    lane_steps: list[int],
    grad_scale: Tensor | None,
    tables: list[Tensor],
    dense: bool,
    adam_w_mode: bool,
    bias_correction: bool,
) -> None:
    """Run the step with the Triton kernel, or as tensor code where ``tables`` is empty.

    Arguments as in ``_fused_adam_cpu``; ``tables`` are those of ``adam_kernel.make_tables``.

    Capture: no host sync, no copy from the host; the tables must live as long as the graph.
    """
    if not tables:
        _fused_adam_tensor_code(
            params, grads, exp_avgs, exp_avg_sqs, main_params, steps, hyper, lane_rows,
            lane_sizes, lane_steps, grad_scale, tables, dense, adam_w_mode,
            bias_correction,
        )  # fmt: skip
        return
    torch._foreach_add_(steps, 1)
    adam_kernel.launch(
        adam_kernel.Tables(*tables),
        adam_kernel.Dtypes(
            params[0].dtype,
            grads[0].dtype,
            exp_avgs[0].dtype,
            main_params[0].dtype if main_params else None,
        ),
        hyper,
        grad_scale,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
    )


def _widen(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def _scaled(
    grads: list[Tensor],
    scale: float,
    scratch: Tensor | None,  # [at least all elements of grads] float32
) -> list[Tensor]:
    """Return scaled gradients as slices of ``scratch``, in memory order; a few operations."""
    if scratch is None:
        return grads
    if len(grads) == 1:
        source = flat_view(grads[0])
    else:
        # Memory order: a permuted tensor would be copied in the order of its indices.
        source = _flatten_dense_tensors(
            [grad if grad.is_contiguous() else flat_view(grad) for grad in grads]
        )
    target = scratch[: source.numel()]
    if source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source)
        if scale != 1.0:
            target.mul_(scale)
    return list(target.split_with_sizes([grad.numel() for grad in grads]))


def _chunks(lists: Sequence[list[Tensor]], limit: int) -> Iterator[list[list[Tensor]]]:
    """Cut parallel lists of dense tensors into parts of at most ``limit`` elements."""
    sizes = [tensor.numel() for tensor in lists[0]]
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if start < index and total + size > limit:
            yield [column[start:index] for column in lists]
            start, total = index, 0
        total += size
        if total > limit:  # so this tensor alone is too large
            flat = [flat_view(column[index]) for column in lists]
            for offset in range(0, size, limit):
                yield [[view[offset : offset + limit]] for view in flat]
            start, total = index + 1, 0
    if start < len(sizes):
        yield [column[start:] for column in lists]


_LIBRARY.impl("fused_adam_", _fused_adam_cpu, "CPU")
_LIBRARY.impl("fused_adam_", _fused_adam_cuda, "CUDA")

fused_adam_ = torch.ops.graphfsdp.fused_adam_.default

__all__ = ["fused_adam_"]
