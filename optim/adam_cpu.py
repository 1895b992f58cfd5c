"""The fused step on the CPU, with torch's vectorised kernels.

Shapes: [...] any shape, the same for all tensors of one parameter or flat run.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from graphfsdp.optim.adam_step import StepArgs, advance, run_tensor_code
from graphfsdp.optim.flat_runs import flat_view
from graphfsdp.optim.remainders import join_remainder, split_remainder_

# Elements that are widened or scaled at a time: few enough for the copies (4 MiB each) to stay in
# the last-level cache, many enough for the overhead of a call not to count.
_CHUNK_NUMEL = 1 << 20


def run_cpu(args: StepArgs) -> None:
    """Run the step with torch's vectorised kernels, or as tensor code where they do not fit.

    The table, the scale and the flag are read on the host, which is free here and happens anew
    each time the node runs.
    """
    if not args.dense or args.te_math:
        run_tensor_code(args)
        return
    advance(args)
    if args.found_inf is not None and args.found_inf.item() != 0:
        return
    if not args.params:  # all are of zero size
        return
    rows = args.hyper.tolist()
    scale = 1.0 if args.grad_scale is None else args.grad_scale.item()
    kernel = torch._fused_adamw_ if args.adam_w_mode else torch._fused_adam_
    # A model weight is no column of its own where there is no main weight.
    columns = [args.params, args.grads, args.exp_avgs, args.exp_avg_sqs]
    columns += [column for column in (args.max_exp_avg_sqs, args.main_params) if column]
    wide_dtype = torch.promote_types(args.params[0].dtype, torch.float32)
    scratch: Tensor | None = None
    if scale != 1.0 or args.grads[0].dtype != wide_dtype:
        numel = min(_CHUNK_NUMEL, sum(grad.numel() for grad in args.grads))
        scratch = torch.empty(numel, dtype=wide_dtype)
    whole = scratch is None and all(column[0].dtype == wide_dtype for column in columns)
    start = 0
    for row, size, first in zip(args.lane_rows, args.lane_sizes, args.lane_steps, strict=True):
        if not size:
            continue
        lr, beta1, beta2, eps, weight_decay = rows[row]
        # With infinitely many steps behind it, a moment needs no correction: beta**inf is 0.
        step = args.steps[first].view(-1)[0] if args.bias_correction else torch.tensor(torch.inf)
        stop = start + size
        lists = [column[start:stop] for column in columns]
        start = stop
        for part in [lists] if whole else _chunks(lists, _CHUNK_NUMEL):
            model, grads, *moments = part
            main = moments.pop() if args.main_params else None
            weights = _main_weights(model, main, wide_dtype)
            wide_moments = [_widen(moment, wide_dtype) for moment in moments]
            kernel(
                weights, _scaled(grads, scale, scratch),
                wide_moments[0], wide_moments[1], wide_moments[2] if args.max_exp_avg_sqs else [],
                [step] * len(weights),
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
                amsgrad=bool(args.max_exp_avg_sqs), maximize=args.maximize,
            )  # fmt: skip
            for moment, wide in zip(moments, wide_moments, strict=True):
                if wide is not moment:
                    torch._foreach_copy_(moment, wide)
            _store_weights(model, main, weights)


def _main_weights(
    model: list[Tensor],
    main: list[Tensor] | None,
    wide_dtype: torch.dtype,
) -> list[Tensor]:
    """Return what the kernel updates: stored tensors, or copies of the wide dtype."""
    if main is None:
        return _widen(model, wide_dtype)
    if main[0].dtype == torch.int16:
        return list(map(join_remainder, model, main))
    return main


def _store_weights(model: list[Tensor], main: list[Tensor] | None, weights: list[Tensor]) -> None:
    if main is not None and main[0].dtype == torch.int16:
        for param, remainder, weight in zip(model, main, weights, strict=True):
            split_remainder_(param, remainder, weight)
    elif weights is not model:
        torch._foreach_copy_(model, weights)


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


__all__ = ["run_cpu"]
