"""A process group of several ranks with one process: copies on the device in NCCL's place.

One GPU cannot hold two ranks of NCCL. Here the other ranks do not exist, and their data is this
rank's: a gather copies the shard once for each rank, a reduction takes what it has. So the bytes,
the kernels' streams and the memory are those of a sharded training, also inside a CUDA graph; the
trained numbers mean nothing, but are the same in every run.
"""

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

# Of each collective's forms c10d calls one; its stub has all.
# mypy: disable-error-code="override"

NAME = "stand_in"


class StandInGroup(dist.ProcessGroup):
    """This rank, and others that have what it has."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]
        self._num_ranks = num_ranks

    def getBackendName(self) -> str:  # noqa: N802 - the name that c10d calls
        """Return the name under which the backend is registered."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name by which c10d finds it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _get_backend(self, device: torch.device) -> "StandInGroup":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy each input into all places of its list."""
        for places, tensor in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(tensor)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        for place in output.view(-1).chunk(self._num_ranks):
            place.copy_(tensor.view(-1))
        return _done([output])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Gather; the name in newer releases of torch."""
        return self._allgather_base(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Reduce; the name in newer releases of torch."""
        return self._reduce_scatter_base(output, tensor, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        whole = tensor.view(self._num_ranks, -1)
        reduce = torch.sum if _is_sum(opts) else torch.mean
        reduce(whole, 0, out=output.view(-1))  # as many bytes are read as others would send
        return _done([output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Add what all ranks have, or leave it."""
        for tensor in tensors if _is_sum(opts) else ():
            tensor.mul_(self._num_ranks)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Leave them: all ranks have the same."""
        return _done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for nobody."""
        return _done([])


class _SharedStore:
    """The store of a group, in which the other ranks have said what this one says."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        folder, _, rank = key.rpartition("/")
        return self._values.get(key) or self._values[f"{folder}/0" if rank.isdigit() else key]

    def add(self, key: str, number: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + number
        return self._num_ranks if key.endswith("/count") else self._counts[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, b"").decode() == expected:
            self._values[key] = desired.encode()
        return self._values.get(key, expected.encode())


def _is_sum(opts: Any) -> bool:
    return opts is None or opts.reduceOp == dist.ReduceOp.SUM


def _done(value: Sequence[Any]) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(value)
    work: dist.Work = _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def _make(store: Any, rank: int, num_ranks: int, timeout: datetime.timedelta) -> StandInGroup:
    return StandInGroup(rank, num_ranks)


@contextmanager
def stand_in_group(num_ranks: int) -> Iterator[None]:
    """Let the body be rank 0 of a group whose other ranks do not exist."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    c10d, shared = dist.distributed_c10d, _SharedStore(num_ranks)
    with (
        # New groups, and whoever agrees on something, would wait until all ranks are there.
        mock.patch.object(c10d, "_store_based_barrier"),
        mock.patch.object(c10d, "_get_process_group_store", return_value=shared),
    ):
        dist.init_process_group(
            NAME, store=_distributed_c10d.HashStore(), rank=0, world_size=num_ranks
        )
        try:
            yield
        finally:
            dist.destroy_process_group()
