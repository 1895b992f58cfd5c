"""The global gradient norm, over tensors that ranks share in different ways."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.collectives import all_reduce_


def global_norm(
    whole: Sequence[Tensor],  # [...] each, the same on every rank
    sharded: Mapping[dist.ProcessGroup, Sequence[Tensor]],  # [...] each, this rank's rows
    device: torch.device,
) -> Tensor:
    """Return [] float32, the 2-norm over all elements of all tensors on all ranks.

    Every rank must name the same groups, also one that holds no row of any tensor.

    Args:
        whole: Gradients that are not sharded.
        sharded: Gradients by the group of ranks that holds the other rows.
        device: Where the result lies.

    Capture: no host sync; one collective per group.
    Source: torch.nn.utils.clip_grad_norm_, whose arithmetic this repeats where nothing is
        sharded: norm per tensor, then the norm of these.
    """
    total = _local_norm(whole, device)
    if not sharded:
        return total.float()
    square = total.double().square()
    for group, tensors in sharded.items():
        part = _local_norm(tensors, device).double().square()
        all_reduce_(part, group, reduction="sum")
        square = square + part
    return square.sqrt().float()


def _local_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(list(tensors), 2, _norm_dtype(tensors))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _norm_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype in which squares are summed, None for the tensors' own."""
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.float64 in dtypes:
        return torch.float64
    # Naming the dtype costs a cast per tensor even where it is float32 already.
    return None if dtypes == {torch.float32} else torch.float32


__all__ = ["global_norm"]
