"""Every collective that graphfsdp issues, each as one operator that says what it writes.

Note [Collectives as operators]: c10d's own operators write tensors without saying so in their
schemas, and gloo finishes a reduce-scatter inside ``Work.wait``, where a recorder sees copies of
its scratch memory. Here issue and wait are one operator with declared mutation, so a recording
holds one node for each, and a replay issues them in the recorded order on every rank.

Shapes: R = ranks of the group; S = elements of one rank's shard.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.errors import ConfigError

_REDUCTIONS = ("sum", "mean", "max")

# A registration lives as long as its library object.
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")
_LIBRARY.define("all_gather_(Tensor(a!) output, Tensor input, str group) -> ()")
_LIBRARY.define("reduce_scatter_(Tensor(a!) output, Tensor input, str group, str reduction) -> ()")
_LIBRARY.define("all_reduce_(Tensor(a!) tensor, str group, str reduction) -> ()")
_LIBRARY.define("broadcast_(Tensor(a!) tensor, str group, int source) -> ()")


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """Return a function of torch.distributed by its newer name where torch has that."""
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


_all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")


def _group_of(name: str) -> dist.ProcessGroup:
    resolve: Callable[[str], dist.ProcessGroup]
    resolve = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined, assignment]
    return resolve(name)


def _reduce_op(reduction: str) -> Any:
    return {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}[
        reduction
    ]


def _all_gather(output: Tensor, input: Tensor, group: str) -> None:  # noqa: A002
    _all_gather_single(output, input, group=_group_of(group))


def _reduce_scatter(output: Tensor, input: Tensor, group: str, reduction: str) -> None:  # noqa: A002
    _reduce_scatter_single(output, input, op=_reduce_op(reduction), group=_group_of(group))


def _all_reduce(tensor: Tensor, group: str, reduction: str) -> None:
    dist.all_reduce(tensor, op=_reduce_op(reduction), group=_group_of(group))


def _broadcast(tensor: Tensor, group: str, source: int) -> None:
    dist.broadcast(tensor, group_src=source, group=_group_of(group))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("all_gather_", _all_gather, _key)
    _LIBRARY.impl("reduce_scatter_", _reduce_scatter, _key)
    _LIBRARY.impl("all_reduce_", _all_reduce, _key)
    _LIBRARY.impl("broadcast_", _broadcast, _key)


def all_gather_(
    output: Tensor,  # [R * S] written: the shards of all ranks in rank order
    shard: Tensor,  # [S] this rank's part, of the same dtype
    group: dist.ProcessGroup,
) -> None:
    """Gather every rank's shard into one buffer.

    Capture: one node; the wait is inside.
    """
    torch.ops.graphfsdp.all_gather_(output, shard, group.group_name)


def reduce_scatter_(
    output: Tensor,  # [S] written: this rank's part of the reduction
    full: Tensor,  # [R * S] what this rank contributes; never memory of ``output``
    group: dist.ProcessGroup,
    *,
    reduction: str = "mean",
) -> None:
    """Reduce the full buffers of all ranks, and keep this rank's part.

    Args:
        reduction: "mean" or "sum" over ranks.

    Raises:
        ConfigError: output and input share memory, or the reduction is unknown.

    Capture: one node; the wait is inside.
    """
    _check_reduction(reduction)
    if output.untyped_storage()._cdata == full.untyped_storage()._cdata:
        raise ConfigError(
            "the output of a reduce-scatter lies in its own input; gloo and NCCL may read the "
            "input after they have begun to write. Remedy: separate storages"
        )
    torch.ops.graphfsdp.reduce_scatter_(output, full, group.group_name, reduction)


def all_reduce_(tensor: Tensor, group: dist.ProcessGroup, *, reduction: str = "mean") -> None:
    """Reduce a tensor over all ranks, in place.

    Args:
        tensor: [...] any shape, the same on all ranks.
        group: The ranks.
        reduction: "mean", "sum" or "max".

    Raises:
        ConfigError: the reduction is unknown.

    Capture: one node; the wait is inside.
    """
    _check_reduction(reduction)
    torch.ops.graphfsdp.all_reduce_(tensor, group.group_name, reduction)


def broadcast_(tensor: Tensor, group: dist.ProcessGroup, *, source: int = 0) -> None:
    """Give every rank the tensor of one rank, in place.

    Args:
        tensor: [...] any shape, the same on all ranks.
        group: The ranks.
        source: Rank within the group that has the value.
    """
    torch.ops.graphfsdp.broadcast_(tensor, group.group_name, source)


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"unknown reduction {reduction!r}; expected one of {_REDUCTIONS}")


__all__ = ["all_gather_", "all_reduce_", "broadcast_", "reduce_scatter_"]
