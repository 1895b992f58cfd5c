"""The operation ``graphfsdp::fused_adam_``: one fused step of many parameters as one node.

Shapes: G = groups; S = parameters that one tensor of step counts stands for; [...] any shape, the
same for all tensors of one parameter.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from graphfsdp.base.torch_internals import foreach_add_, foreach_copy_, key_of
from graphfsdp.optim.fused import kernel
from graphfsdp.optim.fused.state import Flags
from graphfsdp.optim.fused.update import (
    Columns,
    adam_coefficients,
    adam_update_,
    flat_view,
    read_wide,
    store_wide,
)

# Elements that are widened or scaled at a time: no more than an eighth of all, as the copies are
# memory that a step needs besides; many enough for the overhead of a call not to count, and few
# enough for the copies (4 MiB each) to stay in the last-level cache.
_CHUNK_SHARE = 8
_SMALLEST_CHUNK = 1 << 17
_LARGEST_CHUNK = 1 << 20


class StepArgs(NamedTuple):
    """Arguments of ``graphfsdp::fused_adam_``; its schema has columns and flags one by one."""

    columns: Columns
    steps: list[Tensor]  # [S] float32 each, advanced by one unless the step is skipped
    hyper: Tensor  # [G, 5] float64
    rows: list[int]  # of the table, for each parameter
    counts: list[int]  # where the step count of each parameter is among all of ``steps``
    grad_scale: Tensor | None  # [] float, multiplies every gradient
    found_inf: Tensor | None  # [] float; unless it is zero, the step is skipped
    skipped: Tensor | None  # [] float32, counts what is skipped; None: another call does
    tables: list[Tensor]  # of the kernel; empty: tensor code
    dense: bool  # no tensor has gaps
    flags: Flags


_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")  # a registration lives as long as it
_LIBRARY.define(
    "fused_adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] main_params, "
    "Tensor(f!)[] steps, Tensor hyper, int[] rows, int[] counts, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor(g!)? skipped, Tensor[] tables, "
    "bool dense, bool adam_w_mode, bool bias_correction, bool maximize) -> ()"
)


def as_kernel(run: Callable[[StepArgs], None]) -> Callable[..., None]:
    """Return a function with the operation's flat arguments."""

    def run_flat(*args: Any) -> None:
        run(_step_args(args))

    return run_flat


def _step_args(flat: Sequence[Any]) -> StepArgs:
    columns, flags = len(Columns._fields), len(flat) - len(Flags._fields)
    rest = flat[columns:flags]
    return StepArgs._make((Columns(*flat[:columns]), *rest, Flags(*flat[flags:])))


def _advance(args: StepArgs) -> None:
    if args.found_inf is None:
        foreach_add_(args.steps, 1)
        return
    skip = (args.found_inf != 0).to(torch.float32)
    # With alpha, since without it torch would read the tensor on the host, as a number.
    foreach_add_(args.steps, 1 - skip, alpha=1)
    if args.skipped is not None:
        args.skipped.add_(skip)


def _counts(args: StepArgs) -> list[Tensor]:
    """Return the step count of each parameter, [] float32."""
    found = [count for some in args.steps for count in some.unbind()]
    return [found[place] for place in args.counts]


def _run_tensor_code(args: StepArgs) -> None:
    """Run the step as plain tensor code, one parameter after the other."""
    _advance(args)
    for index, (row, count) in enumerate(zip(args.rows, _counts(args), strict=True)):
        adam_update_(
            args.columns.part(index, index + 1),
            adam_coefficients(args.hyper[row], count, args.flags),
            args.flags,
            grad_scale=args.grad_scale,
            found_inf=args.found_inf,
        )


def run_cuda(args: StepArgs) -> None:
    """Run the step with the Triton kernel, or as tensor code where ``tables`` is empty.

    Capture: no host sync, no copy from the host; the tables must live as long as the graph.
    """
    if not args.tables:
        _run_tensor_code(args)
        return
    _advance(args)
    kernel.launch(
        kernel.Tables(*args.tables),
        args.columns,
        args.hyper,
        args.grad_scale,
        args.found_inf,
        args.flags,
    )


def run_cpu(args: StepArgs) -> None:
    """Run the step with torch's vectorised kernels, or as tensor code where they do not fit.

    The table, the scale and the flag are read on the host, which is free here and happens anew
    each time the node runs.
    """
    CpuStep(args).run(args)


class CpuStep:
    """The step on a CPU over given memory: what follows from that alone is found once.

    In each run ``grad_scale``, ``found_inf`` and ``skipped`` may be other tensors.
    """

    def __init__(self, args: StepArgs) -> None:
        self._args = args

    def run(self, args: StepArgs) -> None:
        if not args.dense:
            _run_tensor_code(args)
            return
        _advance(args)
        if args.found_inf is not None and args.found_inf.item() != 0:
            return
        columns = args.columns
        if not columns.params:  # all are of zero size
            return
        wide_dtype = torch.promote_types(columns.params[0].dtype, torch.float32)
        scale = 1.0 if args.grad_scale is None else args.grad_scale.item()
        as_is = scale == 1.0 and columns.grads[0].dtype == wide_dtype
        # Stored as the kernel takes them, all tensors of a group go into one call.
        whole = as_is and all(column[0].dtype == wide_dtype for column in columns if column)
        rows = args.hyper.tolist()
        scratch: Tensor | None = None
        if not as_is:
            scratch = torch.empty(self._most_numel, dtype=wide_dtype, device="cpu")
        for part in self._groups if whole else self._parts:
            taken = part.columns
            if scratch is not None:  # unnamed, so that it is freed before the next one is made
                taken = taken._replace(grads=part.scaled_grads(scale, scratch))
            _update(taken, part.counts, rows[part.row], args.flags, wide_dtype)

    @cached_property
    def _groups(self) -> "list[_Part]":
        args = self._args
        counts = _counts(args)
        if not args.flags.bias_correction:
            # With infinitely many steps behind it, a moment needs no correction: beta**inf = 0.
            counts = [torch.tensor(torch.inf, device="cpu")] * len(counts)
        found = []
        start = 0
        for row, members in itertools.groupby(args.rows):
            stop = start + sum(1 for _ in members)
            found.append(_Part(row, counts[start:stop], args.columns.part(start, stop)))
            start = stop
        return found

    @cached_property
    def _most_numel(self) -> int:
        return max(part.numel for part in self._parts)

    @cached_property
    def _parts(self) -> "list[_Part]":
        return [part for group in self._groups for part in group.chunks()]


class _Part:
    """Tensors of one group that go into one call of torch's kernel."""

    def __init__(self, row: int, counts: list[Tensor], columns: Columns) -> None:
        self.row = row
        self.counts = counts  # [] float32, the step count of each
        self.columns = columns
        self._sizes = [param.numel() for param in columns.params]
        self.numel = sum(self._sizes)

    def chunks(self) -> "Iterator[_Part]":
        """Cut them, which are dense, into parts of few elements."""
        limit = _chunk_numel(self.numel)
        start, total = 0, 0
        for index, size in enumerate(self._sizes):
            if start < index and total + size > limit:
                yield self._part(start, index)
                start, total = index, 0
            total += size
            if total > limit:  # so this tensor alone is too large
                flat = [[flat_view(column[index])] if column else [] for column in self.columns]
                for offset in range(0, size, limit):
                    stop = offset + limit
                    cut = Columns(*([view[offset:stop] for view in column] for column in flat))
                    yield _Part(self.row, self.counts[index : index + 1], cut)
                start, total = index + 1, 0
        if start < len(self._sizes):
            yield self._part(start, len(self._sizes))

    def _part(self, start: int, stop: int) -> "_Part":
        return _Part(self.row, self.counts[start:stop], self.columns.part(start, stop))

    def scaled_grads(self, scale: float, scratch: Tensor) -> list[Tensor]:
        """Return scaled gradients of the scratch's dtype, in its memory."""
        memory = scratch[: self.numel]
        if self._joined is None:
            scaled = list(_unflatten_dense_tensors(memory, self._contiguous))
            foreach_copy_(scaled, self._contiguous)
        else:
            scaled = list(memory.split_with_sizes(self._sizes))
            if self._joined.dtype == memory.dtype:  # one operator for all of them
                torch.mul(self._joined, scale, out=memory)
                return scaled
            memory.copy_(self._joined)
        if scale != 1.0:
            memory.mul_(scale)
        return scaled

    @cached_property
    def _joined(self) -> Tensor | None:
        """[numel] all gradients, where they follow one another."""
        grads = self.columns.grads
        if not _are_neighbours(grads, self._sizes):
            return None
        return flat_view(grads[0], self.numel)

    @cached_property
    def _contiguous(self) -> list[Tensor]:
        # Memory order: a permuted tensor would be copied in the order of its indices.
        grads = self.columns.grads
        return [grad if grad.is_contiguous() else flat_view(grad) for grad in grads]


def _update(
    part: Columns,  # gradients scaled and wide already
    counts: list[Tensor],  # [] float32 each
    hyper_row: Sequence[float],  # [5] see HYPER_COLUMNS
    flags: Flags,
    wide_dtype: torch.dtype,
) -> None:
    """Widen what is stored otherwise, call torch's kernel, and store it again."""
    lr, beta1, beta2, eps, weight_decay = hyper_row
    weights, first, second, largest = read_wide(part, wide_dtype)
    kernel = torch._fused_adamw_ if flags.adam_w_mode else torch._fused_adam_
    kernel(
        weights, part.grads, first, second, largest, counts,
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
        amsgrad=bool(part.max_exp_avg_sqs), maximize=flags.maximize,
    )  # fmt: skip
    store_wide(part, weights, first, second, largest)


def _are_neighbours(grads: list[Tensor], sizes: list[int]) -> bool:
    """Tell whether dense tensors follow one another in one storage, as persistent gradients do."""
    end = grads[0].data_ptr()
    for grad, size in zip(grads, sizes, strict=True):
        if grad.data_ptr() != end:
            return False
        end += size * grad.element_size()
    # Addresses rise between these two, so that all lie in their storage.
    return bool(key_of(grads[0].untyped_storage()) == key_of(grads[-1].untyped_storage()))


def _chunk_numel(total: int) -> int:
    # A multiple, so that a tensor that is cut is cut between two vectors of the kernel.
    share = total // _CHUNK_SHARE // _SMALLEST_CHUNK * _SMALLEST_CHUNK
    return min(max(share, _SMALLEST_CHUNK), _LARGEST_CHUNK)


class _CpuKernel:
    """The kernel for replays on a CPU, which call it and spare the way through C++."""

    def __call__(self, *args: Any) -> None:
        run_cpu(_step_args(args))

    @staticmethod
    def prepared(*args: Any) -> Callable[..., None] | None:
        """Return the kernel for calls with these arguments, but for those that are ``...`` here.

        None if it cannot know anything ahead.
        """
        # Columns and step counts; what else may change is asked for in each run.
        if any(each is ... for each in args[: len(Columns._fields) + 1]):
            return None
        return as_kernel(CpuStep(_step_args(args)).run)


fused_adam_ = torch.ops.graphfsdp.fused_adam_.default

_LIBRARY.impl("fused_adam_", as_kernel(run_cpu), "CPU")
_LIBRARY.impl("fused_adam_", as_kernel(run_cuda), "CUDA")
fused_adam_.py_impl(torch.DispatchKey.CPU)(_CpuKernel())
