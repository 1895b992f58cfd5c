"""Messages between two ranks (isend, irecv) inside an iteration, each one operator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import Exchange

_NAMES = ("isend", "irecv", "batch_isend_irecv")
_begun: ContextVar[list[Exchange] | None] = ContextVar("begun", default=None)


@contextmanager
def messages_as_operators() -> Iterator[None]:
    """Let torch's isend, irecv and batch_isend_irecv be operators that say what they write.

    Note [Messages as operators]: c10d's own operators send and receive without saying so in their
    schemas, and ``Work.wait`` is no operator at all. torch's pipeline schedules, its object lists
    and ``dist.send`` and ``dist.recv`` look the three functions up when they call them. So while
    the body runs they find others, which do the same by an ``Exchange``; threads that are in no
    such body get torch's own. Who holds torch's functions since before (``from torch.distributed
    import isend``) is refused by name in a capture.

    What nobody has waited for at the end is waited for there.
    """
    if not (dist.is_available() and dist.is_initialized()) or _begun.get() is not None:
        yield
        return
    homes: tuple[Any, ...] = (dist, dist.distributed_c10d)
    torchs = {name: getattr(dist, name) for name in _NAMES}
    ours = _functions(torchs)
    begun: list[Exchange] = []
    token = _begun.set(begun)
    try:
        for home in homes:
            vars(home).update(ours)
        yield
        for exchange in begun:
            exchange.wait()
    finally:
        for home in homes:
            vars(home).update(torchs)
        _begun.reset(token)


def _functions(torchs: dict[str, Any]) -> dict[str, Any]:
    def isend(
        tensor: Tensor,
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:
        found = _member(group)
        if found is None:
            return torchs["isend"](tensor, dst, group, tag, group_dst)
        return _begin([], [tensor], [], [_peer(found, dst, group_dst)], found, tag)

    def irecv(
        tensor: Tensor,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Any:
        found = _member(group)
        if found is None or (src is None and group_src is None):  # from anybody: unordered
            return torchs["irecv"](tensor, src, group, tag, group_src)
        return _begin([tensor], [], [_peer(found, src, group_src)], [], found, tag)

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        kinds = {(op.group, op.tag) for op in p2p_op_list}
        found = _member(p2p_op_list[0].group) if len(kinds) == 1 else None
        if found is None:
            return list(torchs["batch_isend_irecv"](p2p_op_list))
        sends = [op for op in p2p_op_list if op.op is isend]
        receives = [op for op in p2p_op_list if op.op is not isend]
        exchange = _begin(
            [op.tensor for op in receives],
            [op.tensor for op in sends],
            [op.group_peer for op in receives],
            [op.group_peer for op in sends],
            found,
            p2p_op_list[0].tag,
        )
        return [exchange]

    return {"isend": isend, "irecv": irecv, "batch_isend_irecv": batch_isend_irecv}


def _begin(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    sources: Sequence[int],
    targets: Sequence[int],
    group: dist.ProcessGroup,
    tag: int,
) -> Exchange:
    begun = _begun.get()
    assert begun is not None
    exchange = Exchange(_real(received), _real(sent), sources, targets, group, tag)
    begun.append(exchange)
    return exchange


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group if messages in it are ours to send: on this thread, by this rank."""
    found = dist.group.WORLD if group is None else group
    is_ours = _begun.get() is not None and isinstance(found, dist.ProcessGroup)
    return found if is_ours and dist.get_rank(found) >= 0 else None


def _peer(group: dist.ProcessGroup, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    assert rank is not None
    return dist.get_group_rank(group, rank)
