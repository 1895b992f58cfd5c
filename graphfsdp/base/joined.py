"""Short collectives over the same ranks, joined to one.

Note [Short collectives]: below some length a collective costs the same however short it is: on a
CPU gloo's turn of threads (some 200 us, measured), on a GPU a launch and NCCL's turn over ranks.
So what small units gather or reduce at about the same time goes together, for one copy on each
side. A sum of joined parts has the bits of the parts' own sums, since gloo's are in the order of
ranks; NCCL's may depend on the place in a message, the same in eager mode and in a replay.

Shapes: R = ranks of the group; S = elements of one rank's shard of one of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import Transfer, all_gather_, reduce_scatter_

# Of all whole tensors of a joined collective.
MAX_BYTES = 1 << 21

_Item = TypeVar("_Item")


def is_short(num_bytes: int) -> bool:
    """Tell whether so many bytes, all together, may be of one collective."""
    return num_bytes <= MAX_BYTES


def joined(items: Iterable[tuple[_Item, Tensor | None, Any]]) -> Iterator[list[_Item]]:
    """Yield neighbours that may go together, in order.

    Args:
        items: What is to be joined; its whole tensor, or None if it must go alone; and what must be
            equal for that: the group, the reduction.
    """
    together: list[_Item] = []
    size, of = 0, None
    for item, whole, needs in items:
        alike = None if whole is None else (needs, whole.dtype, whole.device)
        nbytes = 0 if whole is None else whole.nbytes
        if together and (alike is None or alike != of or not is_short(size + nbytes)):
            yield together
            together, size = [], 0
        together.append(item)
        size, of = size + nbytes, alike
    if together:
        yield together


class JoinedGather:
    """All-gathers that are made as one; each of them may be waited for, in any order.

    All memory is from the stream that this is made on, ``made_on``. That, or whatever stream waits,
    waits for the lane before anything here is freed (see keep_for_current).
    """

    def __init__(
        self,
        wholes: Sequence[Tensor],  # [R * S] each, written
        shards: Sequence[Tensor],  # [S] each
        group: dist.ProcessGroup,
    ) -> None:
        """Put the shards together. Capture: one copy."""
        self._wholes = wholes
        self._sizes = [shard.numel() for shard in shards]
        self._group = group
        self._sent = shards[0].new_empty(sum(self._sizes))
        _join([shard.reshape(-1) for shard in shards], self._sent, dim=0)
        self._arrived = self._sent.new_empty(group.size() * self._sent.numel())
        self._transfer: Transfer | None = Transfer(self._arrived, self._sent)
        self.made_on = self._transfer.made_on
        self._there: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Capture: one collective, on the current stream; the first ``wait`` is two nodes."""
        all_gather_(self._arrived, self._sent, self._group, self._transfer)

    def wait(self) -> None:
        """On CUDA the current stream waits, on a CPU the host; then all wholes are there."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            if self._there is not None and self.made_on is not None:
                # The copy is on another stream, if units run on several.
                torch.cuda.current_stream(self.made_on.device).wait_event(self._there)
            return
        transfer.wait()
        ranks = self._arrived.view(-1, sum(self._sizes))
        out = [whole.view(len(ranks), -1) for whole in self._wholes]
        # What was begun inside of torch.inference_mode may be waited for outside of it.
        with torch.inference_mode(self._arrived.is_inference()):
            torch.split_with_sizes_copy(ranks, self._sizes, dim=1, out=out)
        if ranks.is_cuda:
            self._there = torch.cuda.current_stream(ranks.device).record_event()
        del self._arrived, self._sent, self._wholes


class JoinedReduceScatter:
    """Reduce-scatters that are made as one. Memory is as that of JoinedGather.

    ``parts``: what this rank has of each, [S], behind ``wait``.
    """

    def __init__(self, wholes: Sequence[Tensor], group: dist.ProcessGroup, reduction: str) -> None:
        """Put together [R * S] each, what this rank contributes. Capture: one copy."""
        ranks = group.size()
        self._group, self._reduction = group, reduction
        self._sent = wholes[0].new_empty(sum(whole.numel() for whole in wholes))
        _join([whole.view(ranks, -1) for whole in wholes], self._sent.view(ranks, -1), dim=1)
        self._reduced = self._sent.new_empty(self._sent.numel() // ranks)
        self.parts = self._reduced.split([whole.numel() // ranks for whole in wholes])
        self._transfer: Transfer | None = Transfer(self._reduced, self._sent)

    def begin(self) -> None:
        """Capture: one collective, on the current stream; the first ``wait`` is one node."""
        reduce_scatter_(
            self._reduced,
            self._sent,
            self._group,
            reduction=self._reduction,
            transfer=self._transfer,
        )

    def wait(self) -> None:
        """On CUDA the current stream waits, on a CPU the host; then all parts are there."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
            del self._sent


def _join(parts: Sequence[Tensor], whole: Tensor, dim: int) -> None:
    # Into given memory, where autocast has no say: it refuses to make one of another 16-bit dtype
    # than its own.
    torch.cat(list(parts), dim, out=whole)
