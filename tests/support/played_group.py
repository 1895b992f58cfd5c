"""A group whose other ranks do not exist: their data is this rank's.

A gather copies the shard once for each rank, a reduction takes what it has. So the bytes, the
kernels' streams and the memory are those of a sharded training, also inside a CUDA graph; the
trained numbers mean nothing, but are the same in every run.
"""

import datetime
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

from graphfsdp.base.rank_agreement import RankStore

# Of each collective's forms c10d calls one; its stub has all. Here are those that a step needs.
# mypy: disable-error-code="override"

NAME = "played"


class PlayedGroup(dist.ProcessGroup):
    """This rank, and others that have what it has."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]
        self._num_ranks = num_ranks

    def getBackendName(self) -> str:  # noqa: N802 - the name that c10d calls
        return NAME

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _get_backend(self, device: torch.device) -> "PlayedGroup":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return 0  # nobody is there to compare with

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for places, tensor in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(tensor)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        for place in output.view(-1).chunk(self._num_ranks):
            place.copy_(tensor.view(-1))
        return _done([output])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self._allgather_base(output, tensor, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _done(tensors)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_base(output, tensor, opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        whole = tensor.view(self._num_ranks, -1)
        reduce = torch.sum if _is_sum(opts) else torch.mean
        reduce(whole, 0, out=output.view(-1))  # as many bytes are read as others would send
        return _done([output])


def _is_sum(opts: Any) -> bool:
    return opts is None or opts.reduceOp == dist.ReduceOp.SUM


def _done(value: Sequence[Any]) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(value)
    work: dist.Work = _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def _make(store: Any, rank: int, num_ranks: int, timeout: datetime.timedelta) -> PlayedGroup:
    return PlayedGroup(rank, num_ranks)


@contextmanager
def played_ranks(num_ranks: int) -> Iterator[None]:
    """Let the body be rank 0 of a group whose other ranks do not exist."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    make_store = RankStore.__init__

    def make_store_of_one(
        store: RankStore, groups: Iterable[dist.ProcessGroup], purpose: str
    ) -> None:
        make_store(store, (), purpose)

    with pytest.MonkeyPatch.context() as patch:
        # New groups, and whoever agrees on something, would wait until all ranks are there.
        patch.setattr(dist.distributed_c10d, "_store_based_barrier", lambda *_, **__: None)
        patch.setattr(RankStore, "__init__", make_store_of_one)
        dist.init_process_group(
            NAME, store=_distributed_c10d.HashStore(), rank=0, world_size=num_ranks
        )
        try:
            yield
        finally:
            dist.destroy_process_group()
