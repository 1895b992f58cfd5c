"""Every collective that graphfsdp issues, each as one operator that says what it writes.

Note [Collectives as operators]: c10d's own operators write tensors without saying so in their
schemas, and gloo finishes a reduce-scatter inside ``Work.wait``, where a recorder sees copies of
its scratch memory. Here issue and wait are one operator with declared mutation, so a recording
holds one node for each, and a replay issues them in the recorded order on every rank.

Note [Issue and wait apart]: a collective that is given a ticket is only issued. What is to be
waited for lies on the ticket, an empty tensor that is made for this one collective, and ``wait_``
takes it off again, so nothing outlives the iteration and no table of handles is kept anywhere.
``wait_`` says that it reads the input and writes the output once more: whoever plans memory from
what operators touch keeps both until then. On a CPU the handle is gloo's Work. On CUDA it is an
event on the stream that the collective was issued on, and the wait is the current stream's.

Note [Waiting for gloo]: nothing ends a collective of gloo from inside the process, and the thread
that waits for it runs no Python. So inside ``interruptible`` the wait is made in slices: after
each one somebody is asked who may raise. The collective itself stays under way.

Note [Messages]: what one rank sends to another (isend, irecv) is one operator for each call or
batch, ``exchange_``, and another that waits. gloo takes a wait for a message that ends early for
the end of the connection, and tells of none whether it has arrived. So inside ``interruptible``
another thread waits for each message. If one is given up, just that end of the connection frees the
thread: one that still waited when Python ends would take the process with it (SIGABRT).

Note [Gloo's short ways]: gloo's all-gather and reduce-scatter go round a ring, and its
reduce-scatter is a whole all-reduce: each turn wakes a thread, which costs a short collective more
than its bytes do. With all_to_all every rank has all the others' parts after one turn, so a
reduce-scatter is that and a sum in the order of ranks (a fixed order, whatever the sizes), and a
gather of a few bytes is that of as many copies.

Shapes: R = ranks of the group; S = elements of one rank's shard.
"""

import datetime
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.streams import keep_for_current, stream_of
from graphfsdp.base.torch_internals import backend_of

_SLICE_S = 0.1
_SHORT_BYTES = 1 << 22  # a gather of more is made by the ring, which needs no copies
_JOIN_S = 5.0

# A registration lives as long as its library object.
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")

# Gloo knows no int16, no unsigned ones but bytes, and no float8. What is only moved is bytes then.
_KNOWN_TO_BACKENDS = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)


def _renamed(new: str, old: str) -> Callable[..., Any]:
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


def _all_gather(output: Tensor, input: Tensor, group: str, ticket: Tensor | None = None) -> None:  # noqa: A002
    members = _group_of(group)
    if output.dtype not in _KNOWN_TO_BACKENDS and output.numel():
        output, input = (each.view(-1).view(torch.uint8) for each in (output, input))  # noqa: A001
    is_short = 0 < output.nbytes <= _SHORT_BYTES and _is_gloo(members, output)
    gather = _gather_copies if is_short else _all_gather_single
    _issue(partial(gather, output, input, group=members), ticket)


def _reduce_scatter(
    output: Tensor,
    input: Tensor,  # noqa: A002
    group: str,
    reduction: str,
    ticket: Tensor | None = None,
) -> None:
    members = _group_of(group)
    if input.numel() and _is_gloo(members, input):
        scatter = partial(_scatter_sums, output, input, reduction=reduction, group=members)
    else:
        operation = _reduce_op(reduction)
        scatter = partial(_reduce_scatter_single, output, input, op=operation, group=members)
    _issue(scatter, ticket)


def _is_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    return tensor.is_cpu and backend_of(group, tensor.device).name() == "gloo"


def _gather_copies(
    output: Tensor,
    input: Tensor,  # noqa: A002
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    copies = input.reshape(-1).repeat(group.size())
    return dist.all_to_all_single(output.view(-1), copies, group=group, async_op=async_op)


def _scatter_sums(
    output: Tensor,
    input: Tensor,  # noqa: A002
    *,
    reduction: str,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    parts = input.new_empty(group.size(), output.numel())  # [R, S]
    moved = dist.all_to_all_single(parts.view(-1), input.reshape(-1), group=group, async_op=True)

    def wait(*timeout: datetime.timedelta) -> None:
        moved.wait(*timeout)
        _reduce_parts(output, parts, reduction)

    return SimpleNamespace(wait=wait) if async_op else wait()  # as torch's Work has it


def _reduce_parts(output: Tensor, parts: Tensor, reduction: str) -> None:
    first, *others = (part.view(output.shape) for part in parts)
    output.copy_(first)
    for part in others:
        if reduction == "max":
            torch.maximum(output, part, out=output)
        else:
            output.add_(part)
    if reduction == "mean":
        output.div_(len(parts))


def _all_reduce(tensor: Tensor, group: str, reduction: str, ticket: Tensor | None = None) -> None:
    operation = _reduce_op(reduction)
    _issue(partial(dist.all_reduce, tensor, op=operation, group=_group_of(group)), ticket)


def _issue(collective: partial[Any], ticket: Tensor | None) -> None:
    """Run a collective, or begin it and leave on the ticket what is to be waited for."""
    if ticket is None:
        if _asked.get() is None or not collective.args[0].is_cpu:
            collective()
        else:
            _wait_for(collective(async_op=True))
        return
    handle: Any = ticket
    if ticket.is_cuda:
        # Queued on the current stream, a side stream. Not run on a GPU yet.
        collective()
        handle.under_way = torch.cuda.current_stream(ticket.device).record_event()
    else:
        handle.under_way = collective(async_op=True)


def _wait(output: Tensor, input: Tensor, ticket: Tensor) -> None:  # noqa: A002
    under_way = vars(ticket).pop("under_way")
    if ticket.is_cuda:
        torch.cuda.current_stream(ticket.device).wait_event(under_way)
    else:
        _wait_for(under_way)


class Interruptible:
    """What is known of the waits inside ``interruptible``.

    Attributes:
        ask: May raise; called now and then.
        begun: How many messages, by process group and two ranks, by number in the world.
        ended: How many of them were waited for.
        by_gloo: How many of them gloo has counted among its collectives, by process group.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self.ask = ask
        self.begun: Counter[tuple[str, int, int]] = Counter()
        self.ended: Counter[tuple[str, int, int]] = Counter()
        self.by_gloo: Counter[str] = Counter()

    def wait_for_message(self, work: Any) -> None:
        """Wait for a message of gloo; see Note [Messages]."""
        failed: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=wait, name="graphfsdp message", daemon=True)
        thread.start()
        try:
            thread.join(_SLICE_S)
            while thread.is_alive():
                self.ask()
                thread.join(_SLICE_S)
        except BaseException:
            with suppress(RuntimeError):  # the timeout itself
                work.wait(datetime.timedelta(milliseconds=1))
            thread.join(_JOIN_S)
            raise
        if failed:
            self.ask()
            raise failed[0]


_asked: ContextVar[Interruptible | None] = ContextVar("asked", default=None)


@contextmanager
def interruptible(ask: Callable[[], None]) -> Iterator[Interruptible]:
    """Call ``ask`` now and then while the body waits on a CPU; see Note [Waiting for gloo].

    It may raise; then the wait ends, and what was waited for is lost.
    """
    waits = Interruptible(ask)
    token = _asked.set(waits)
    try:
        yield waits
    finally:
        _asked.reset(token)


def _wait_for(work: Any) -> None:
    waits = _asked.get()
    if waits is None or work is None:
        if work is not None:
            work.wait()
        return
    while True:
        started = time.monotonic()
        try:
            work.wait(datetime.timedelta(seconds=_SLICE_S))
        except RuntimeError as error:
            if "finite timeout not implemented" in str(error):  # a group that is written in Python
                work.wait()
                return
            if time.monotonic() - started < _SLICE_S:  # not this slice's end, but a failure
                waits.ask()
                raise
        else:
            return
        waits.ask()


def _exchange(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    sources: Sequence[int],
    targets: Sequence[int],
    tag: int,
    group: str,
    ticket: Tensor,
) -> None:
    process_group = _group_of(group)
    backend: Any = backend_of(process_group, ticket.device)

    def begin() -> list[Any]:
        works = [process_group.send([t], rank, tag) for t, rank in zip(sent, targets, strict=True)]
        for tensor, rank in zip(received, sources, strict=True):
            works.append(process_group.recv([tensor], rank, tag))
        return works

    ranks = dist.get_process_group_ranks(process_group)
    me = ranks[process_group.rank()]
    peers = [ranks[peer] for peer in (*sources, *targets)]
    pairs = [(group, min(me, peer), max(me, peer)) for peer in peers]
    waits = _asked.get()
    if waits is not None:
        waits.begun.update(pairs)
        waits.by_gloo[group] += len(pairs) if backend.name() == "gloo" else 0
    if len(sources) + len(targets) > 1 and backend.supports_coalescing:
        coalescing: Any = dist.distributed_c10d._coalescing_manager
        with coalescing(process_group, ticket.device, async_ops=True) as together:
            begin()
        works = together.works
    else:
        works = begin()
    handle: Any = ticket
    handle.under_way = works, pairs


def _wait_exchange(received: Sequence[Tensor], sent: Sequence[Tensor], ticket: Tensor) -> None:
    waits = _asked.get()
    works, pairs = vars(ticket).pop("under_way")
    for work in works:
        if waits is None or ticket.is_cuda:
            work.wait()  # on CUDA the current stream waits
        else:
            waits.wait_for_message(work)
    if waits is not None:
        waits.ended.update(pairs)


def _all_to_all(output: Tensor, input: Tensor, group: str) -> None:  # noqa: A002
    _issue(partial(dist.all_to_all_single, output, input, group=_group_of(group)), None)


def _broadcast(tensor: Tensor, group: str, source: int) -> None:
    _issue(partial(dist.broadcast, tensor, group_src=source, group=_group_of(group)), None)


def _nothing(*_args: Any) -> None:
    """Do nothing: tensors on the meta device have no contents that ranks could exchange."""


_TICKET = "Tensor(b!)? ticket=None"
_REDUCED = f"str reduction, {_TICKET}"
_MESSAGES = "Tensor(a!)[] received, Tensor[] sent"
for _name, _run, _arguments in (
    ("all_gather_", _all_gather, f"Tensor(a!) output, Tensor input, str group, {_TICKET}"),
    ("reduce_scatter_", _reduce_scatter, f"Tensor(a!) output, Tensor input, str group, {_REDUCED}"),
    ("all_reduce_", _all_reduce, f"Tensor(a!) tensor, str group, {_REDUCED}"),
    ("all_to_all_", _all_to_all, "Tensor(a!) output, Tensor input, str group"),
    ("broadcast_", _broadcast, "Tensor(a!) tensor, str group, int source"),
    ("wait_", _wait, "Tensor(a!) output, Tensor input, Tensor(b!) ticket"),
    (
        "exchange_",
        _exchange,
        f"{_MESSAGES}, int[] sources, int[] targets, int tag, str group, Tensor(b!) ticket",
    ),
    ("wait_exchange_", _wait_exchange, f"{_MESSAGES}, Tensor(b!) ticket"),
):
    _LIBRARY.define(f"{_name}({_arguments}) -> ()")
    for _key, _kernel in (("CPU", _run), ("CUDA", _run), ("Meta", _nothing)):
        _LIBRARY.impl(_name, _kernel, _key)


class Exchange:
    """Messages between this rank and others that are under way, as torch's Work is waited for."""

    def __init__(
        self,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        sources: Sequence[int],
        targets: Sequence[int],
        group: dist.ProcessGroup,
        tag: int = 0,
    ) -> None:
        """Begin them; ``sources`` and ``targets`` are ranks of the group.

        Capture: one node; ``wait`` is another one.
        """
        self._received = [tensor.detach() for tensor in received]
        self._sent = [tensor.detach() for tensor in sent]
        self._ticket: Tensor | None = [*received, *sent][0].new_empty(0)
        torch.ops.graphfsdp.exchange_(
            self._received, self._sent, sources, targets, tag, group.group_name, self._ticket
        )

    def is_completed(self) -> bool:
        return self._ticket is None

    def wait(self, timeout: object = None) -> bool:
        """On CUDA the current stream waits, on a CPU the host; ``timeout`` is the group's."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            torch.ops.graphfsdp.wait_exchange_(self._received, self._sent, ticket)
            self._received, self._sent = [], []
        return True


class Transfer:
    """A collective that is under way; the memory that it uses lives as long as this.

    ``made_on``: the stream that was current then, of a GPU.
    """

    def __init__(self, output: Tensor, source: Tensor) -> None:
        self._output = output
        self._source = source
        self.made_on = stream_of(output)
        self.ticket: Tensor = output.new_empty(0)

    def wait(self) -> None:
        """On CUDA the current stream waits, on a CPU the host. Capture: one node."""
        torch.ops.graphfsdp.wait_(self._output, self._source, self.ticket)
        keep_for_current((self._output, self._source), self.made_on)


def all_gather_(
    output: Tensor,  # [R * S] written: the shards of all ranks in rank order
    shard: Tensor,  # [S] this rank's part, of the same dtype
    group: dist.ProcessGroup,
    transfer: Transfer | None = None,
) -> None:
    """Capture: one node; the wait is inside, or, with a transfer, another one."""
    torch.ops.graphfsdp.all_gather_(output, shard, group.group_name, _ticket_of(transfer))


def reduce_scatter_(
    output: Tensor,  # [S] written: this rank's part of the reduction
    full: Tensor,  # [R * S] what this rank contributes; never memory of ``output``
    group: dist.ProcessGroup,
    *,
    reduction: str = "mean",
    transfer: Transfer | None = None,
) -> None:
    """Reduce by "mean" or "sum", and keep this rank's part.

    Capture: as ``all_gather_``.
    """
    ticket = _ticket_of(transfer)
    torch.ops.graphfsdp.reduce_scatter_(output, full, group.group_name, reduction, ticket)


def all_reduce_(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    reduction: str = "mean",
    transfer: Transfer | None = None,
) -> None:
    """Reduce in place by "mean", "sum" or "max".

    Capture: as ``all_gather_``.
    """
    torch.ops.graphfsdp.all_reduce_(tensor, group.group_name, reduction, _ticket_of(transfer))


def all_to_all_(
    output: Tensor,  # [R, ...] written: what each rank has for this one, in rank order
    parts: Tensor,  # [R, ...] what this rank has for each; never memory of ``output``
    group: dist.ProcessGroup,
) -> None:
    """Exchange parts of equal, fixed size.

    Capture: one node; the wait is inside.
    """
    torch.ops.graphfsdp.all_to_all_(output, parts, group.group_name)


def broadcast_(tensor: Tensor, group: dist.ProcessGroup, *, source: int = 0) -> None:
    """Give every rank the tensor of the rank ``source`` of the group, in place."""
    torch.ops.graphfsdp.broadcast_(tensor, group.group_name, source)


def _ticket_of(transfer: Transfer | None) -> Tensor | None:
    return None if transfer is None else transfer.ticket
