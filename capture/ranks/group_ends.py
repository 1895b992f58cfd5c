"""Graphs go before the process groups whose communicators they hold.

Note [Graphs before groups]: NCCL finalizes, destroys and aborts a communicator only when every
graph that has captured one of its collectives is gone (from 2.26 on; ``commDestroySync`` in init.cc
polls ``localPersistentRefs``). With such a graph alive ``destroy_process_group`` never returns, and
an abort sets its flag, upon which the kernels leave, and then does not return either. torch has no
hook for the end of a group. But each way to it, of all groups or of one, however its name was
imported, looks up ``shutdown`` or ``abort`` of ProcessGroup. So these are replaced, once in a
process, by functions that give the graphs back first.
"""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from graphfsdp.base.torch_internals import all_groups, backend_of

_LOG = logging.getLogger("graphfsdp")
_AFTERWARDS = timedelta(seconds=1)
_JOIN_S = 5.0  # for aborts whose graphs are gone
_BEGINS_S = 0.001  # between two looks at a thread that has not begun
_THREAD = "graphfsdp aborts {}"


class HoldsGroups(Protocol):
    """A graph that has captured collectives."""

    groups: frozenset[str]

    def close(self) -> None:
        """Wait for what is in flight, and give the graph back."""
        ...

    def abandon(self) -> None:
        """Give the graph back without waiting: what is in flight may wait for another rank."""
        ...


def close_before_groups_end(graph: HoldsGroups) -> None:
    """Have a graph that lives until then go before one of its groups ends."""
    _holders().add(graph)


def issued_collectives() -> dict[str, int]:
    """Return how many collectives this rank has issued in each group that a driver records."""
    return {
        group.group_name: int(backend._get_sequence_number_for_group())
        for group in all_groups()
        for backend in backends_of(group)
        if backend.name() != "gloo"
    }


def backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    for device_type in ("cpu", "cuda"):
        try:
            yield backend_of(group, device_type)
        except RuntimeError:  # none for this device
            continue


def abort_groups() -> None:
    """Abort all process groups of this process; may be called again, and by several threads.

    Each abort has a thread of its own: it only ends when the graphs are gone, but the flags that
    free all kernels are set before that. A graph that a thread is just launching goes when that
    thread comes out and calls this as well.
    """
    aborts = []
    for group in all_groups():
        for backend in backends_of(group):
            if backend.name() == "gloo":
                with suppress(RuntimeError):  # it is destroyed
                    backend._set_default_timeout(_AFTERWARDS)
            else:
                aborts.append(_begin_abort(group.group_name, backend.abort))
    _end_aborts(aborts, list(_holders()))


def _begin_abort(name: str, abort: Callable[[], None]) -> threading.Thread:
    # A second abort of a group would wait for the first one.
    known = {thread.name: thread for thread in threading.enumerate()}
    thread = known.get(_THREAD.format(name))
    if thread is None:

        def run() -> None:
            with suppress(RuntimeError):  # it is destroyed, or cannot be aborted
                abort()

        thread = threading.Thread(target=run, name=_THREAD.format(name), daemon=True)
        thread.start()
    return thread


def _end_aborts(aborts: Iterable[threading.Thread], graphs: Iterable[HoldsGroups]) -> None:
    for graph in graphs:
        graph.abandon()
    deadline = time.monotonic() + _JOIN_S
    for thread in aborts:
        _join(thread, deadline)


def _join(thread: threading.Thread, deadline: float) -> None:
    """Wait for a thread, which somebody else may have made just now, so that it has not begun."""
    while True:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
        except RuntimeError:  # it has not begun
            if time.monotonic() > deadline:
                return
            time.sleep(_BEGINS_S)
        else:
            return


def _holders() -> "weakref.WeakSet[HoldsGroups]":
    """Return the graphs of this process; they are kept by what was replaced, as long as that."""
    kind: Any = dist.ProcessGroup
    found: weakref.WeakSet[HoldsGroups] | None = getattr(kind.shutdown, "holders", None)
    if found is None:
        found = weakref.WeakSet()
        kind.shutdown = _shutdown(kind.shutdown, found)
        kind.abort = _abort(kind.abort, found)
    return found


def _shutdown(torchs: Any, holders: "weakref.WeakSet[HoldsGroups]") -> Any:
    @functools.wraps(torchs)
    def shutdown(group: dist.ProcessGroup, *args: Any) -> Any:
        graphs = _of(group, holders)
        for graph in graphs:
            graph.close()
        if graphs:
            _LOG.info(
                "process group %s ends: %d graph(s) that hold its communicator were closed first",
                group.group_name,
                len(graphs),
            )
        return torchs(group, *args)

    shutdown.holders = holders  # type: ignore[attr-defined]
    return shutdown


def _abort(torchs: Any, holders: "weakref.WeakSet[HoldsGroups]") -> Any:
    @functools.wraps(torchs)
    def abort(group: dist.ProcessGroup, *args: Any) -> Any:
        graphs = _of(group, holders)
        if not graphs:
            return torchs(group, *args)
        name = group.group_name
        _end_aborts([_begin_abort(name, lambda: torchs(group, *args))], graphs)
        _LOG.info("process group %s was aborted, and %d graph(s) of it closed", name, len(graphs))

    return abort


def _of(group: dist.ProcessGroup, holders: "weakref.WeakSet[HoldsGroups]") -> list[HoldsGroups]:
    return [graph for graph in list(holders) if group.group_name in graph.groups]
