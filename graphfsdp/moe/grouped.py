"""Grouped matrix products: each group of rows times a matrix of its own, sizes on the device.

Note [Sizes on the device]: how many rows a group has is data, and a host that asked for it could
not be in a graph. So it is asked for inside one operator. On a CPU that multiplies group by group,
with exactly the group's rows, whose bits are those of a loop over experts in eager mode. On CUDA it
is torch's grouped product where that runs without the host: bfloat16 on compute capability 9 and
10. Elsewhere groups are padded to the most rows that one may have, for a batched product.

Shapes: G = groups, M = rows (those behind the last group are padding), I and O = widths.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch has it)
from torch import Tensor

# A registration lives as long as its library object.
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor x, Tensor weight, Tensor ends, int most) -> Tensor")
_LIBRARY.define("grouped_mm_weight(Tensor x, Tensor grad, Tensor ends, int most) -> Tensor")
_BORDER_BYTES = 64  # where torch's own memory begins, on a CPU
_ALIGNED_BYTES = 16  # of rows, for the kernels of torch's grouped product


def grouped_mm(
    x: Tensor,  # [M, I]
    weight: Tensor,  # [G, I, O]
    ends: Tensor,  # [G] int32, the row behind the last one of each group
    most: int,
) -> Tensor:  # [M, O]; padding has no defined values
    """Multiply rows by the matrix of their group, which has at most ``most`` of them.

    Capture: one node, no host sync; its gradients are two.
    """
    product: Tensor = _GroupedProduct.apply(x, weight, ends, most)  # type: ignore[no-untyped-call]
    return product


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.most = most
        product: Tensor = torch.ops.graphfsdp.grouped_mm(x, weight, ends, most)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        ops, grad = torch.ops.graphfsdp, grads[0].contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = ops.grouped_mm(grad, weight.mT, ends, ctx.most)
        if ctx.needs_input_grad[1]:
            of_weight = ops.grouped_mm_weight(x, grad, ends, ctx.most)
        return of_x, of_weight, None, None


def _on_cpu(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    product = x.new_zeros(x.shape[0], weight.shape[2])
    for group, rows in _groups_with_rows(ends):
        _multiply(x[rows], weight[group], product[rows])
    return product


def _weight_on_cpu(x: Tensor, grad: Tensor, ends: Tensor, most: int) -> Tensor:
    products = x.new_zeros(ends.numel(), x.shape[1], grad.shape[1])
    for group, rows in _groups_with_rows(ends):
        _multiply(x[rows].t(), grad[rows], products[group])
    return products


def _groups_with_rows(ends: Tensor) -> Iterator[tuple[int, slice]]:
    bounds = itertools.pairwise([0, *ends.tolist()])
    return ((group, slice(*rows)) for group, rows in enumerate(bounds) if rows[1] > rows[0])


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiply what begins on a border of memory, so that bits do not depend on where it lies."""
    left, right = (part if _is_aligned(part) else part.clone() for part in (left, right))
    if _is_aligned(out):
        torch.mm(left, right, out=out)
    else:
        out.copy_(left.mm(right))


def _is_aligned(part: Tensor) -> bool:
    return part.data_ptr() % _BORDER_BYTES == 0


def _on_cuda(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    if _has_grouped_kernel(x, weight.shape[2]):
        product: Tensor = F.grouped_mm(x, weight, offs=ends)
        return product
    places = _padded_places(ends, most, x.shape[0])
    padded = _with_zero_row(x)[places].bmm(weight)  # [G, most, O]
    rows = x.new_zeros(x.shape[0] + 1, weight.shape[2])
    return rows.index_copy_(0, places.flatten(), padded.flatten(0, 1))[:-1].clone()


def _weight_on_cuda(x: Tensor, grad: Tensor, ends: Tensor, most: int) -> Tensor:
    if _has_grouped_kernel(x, grad.shape[1]):
        products: Tensor = F.grouped_mm(x.t(), grad, offs=ends)
        # Nothing promises zeros for a group without rows.
        return products.masked_fill_((_sizes(ends) == 0)[:, None, None], 0)
    places = _padded_places(ends, most, x.shape[0])
    return _with_zero_row(x)[places].mT.bmm(_with_zero_row(grad)[places])


def _has_grouped_kernel(x: Tensor, width: int) -> bool:
    aligned = all(size * x.itemsize % _ALIGNED_BYTES == 0 for size in (x.shape[1], width))
    major, _ = torch.cuda.get_device_capability(x.device)
    return aligned and x.dtype is torch.bfloat16 and major in (9, 10)


def _sizes(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _padded_places(ends: Tensor, most: int, num_rows: int) -> Tensor:  # [G, most] int64
    """Return the row at each place of each group; behind the group's last one ``num_rows``."""
    place = torch.arange(most, device=ends.device)
    sizes = _sizes(ends)
    rows = (ends - sizes)[:, None] + place
    return rows.masked_fill(place >= sizes[:, None], num_rows)


def _with_zero_row(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _on_meta(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _weight_on_meta(x: Tensor, grad: Tensor, ends: Tensor, most: int) -> Tensor:
    return x.new_empty(ends.numel(), x.shape[1], grad.shape[1])


for _key, _product, _weight in (
    ("CPU", _on_cpu, _weight_on_cpu),
    ("CUDA", _on_cuda, _weight_on_cuda),
    ("Meta", _on_meta, _weight_on_meta),
):
    _LIBRARY.impl("grouped_mm", _product, _key)
    _LIBRARY.impl("grouped_mm_weight", _weight, _key)
