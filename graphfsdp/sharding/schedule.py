"""When units gather and reduce: ahead of their use, and while others compute.

Note [Order of units]: which unit comes next is what came next the last time. A pass that takes
another way (a unit is skipped, or runs twice) gathers for itself from there on, as without
prefetch, and the way that it took is what the next pass goes by. All ranks run the same units, so
all go by the same order. What was gathered for nobody is dropped when the pass ends.

Note [Nothing survives a pass]: what begins in a forward pass is over when its outermost unit
returns, what begins in a backward pass when autograd's last callback has run. On CUDA both side
streams have then joined the current stream, so a capture may begin and end around the iteration.

Note [Collectives in a graph]: branches of a CUDA graph have no order, and each rank's GPU chooses
by itself. Where one rank begins with an all-gather and another one with a reduction, each waits for
the other, for ever if a GPU has no room for both. So in a capture all collectives go by one lane,
and a gather that was not begun ahead comes behind what is under way there.

Note [Small units go together]: the next unit's weights are gathered ahead, and with them those of
the units behind it as long as all are short (base/joined); nothing more is gathered until the first
unit is on that has nothing here. Gradients of small units wait for each other, at most until the
pass is over. So a model of many small units has few collectives, of which each costs its latency.
Without ``overlap`` each unit is gathered and reduced on its own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch

from graphfsdp.base.joined import is_short
from graphfsdp.base.streams import Lane, is_capturing
from graphfsdp.base.torch_internals import (
    NO_BACKWARD,
    backward_id,
    backward_node,
    when_backward_ends,
)
from graphfsdp.sharding.buffer import ShardBuffer, begin_unshard
from graphfsdp.sharding.gradients import Gradients, How, begin_reductions
from graphfsdp.sharding.group import ShardGroup
from graphfsdp.sharding.packing import PackedWeights

# Whole gradient buffers that may be alive: one is being reduced, one is being filled.
MAX_FULL_GRADS = 2


class Scheduled(Protocol):
    @property
    def group(self) -> ShardGroup: ...

    def missing(self, buffers: Iterable[ShardBuffer]) -> list[ShardBuffer]: ...

    def leave_backward(self) -> None: ...

    def end_pass(self) -> None: ...


Entry = tuple[Scheduled, ShardBuffer]


class Order:
    """The order in which buffers were gathered the last time; the next pass goes by ``known``."""

    def __init__(self) -> None:
        self.known: Sequence[Entry] = ()
        self._seen: list[Entry] = []
        self._follows = True

    def begin(self) -> None:
        """Begin a pass; what an unfinished one has seen is forgotten."""
        self._seen, self._follows = [], True

    def end(self) -> None:
        self.known = self._seen
        self.begin()

    def note(self, unit: Scheduled, buffers: Sequence[ShardBuffer]) -> list[Entry]:
        """Return the next units' buffers, if known; of the same unit those that follow at once."""
        for buffer in buffers:
            index = len(self._seen)
            self._seen.append((unit, buffer))
            if index >= len(self.known) or self.known[index][1] is not buffer:
                self._follows = False
        return list(self._next(unit)) if self._follows else []

    def _next(self, unit: Scheduled) -> Iterator[Entry]:
        ahead = 0
        for following, entries in groupby(self.known[len(self._seen) :], itemgetter(0)):
            if following is unit and not ahead:
                yield from entries
                continue
            others = list(entries)
            size = sum(buffer.whole_bytes for _, buffer in others)
            if ahead and not is_short(ahead + size):
                return
            yield from others
            ahead += size


class _Reduction(NamedTuple):
    """A unit's gradients on their way; ``done`` is called when that is over."""

    unit: Scheduled
    gradients: Sequence[Gradients]
    how: How
    done: Callable[[], None] | None

    @property
    def waits(self) -> bool:
        """Whether others may join it."""
        return all(each.joinable is not None for each in self.gradients)

    @property
    def whole_bytes(self) -> int:
        return sum(each.joinable.nbytes for each in self.gradients if each.joinable is not None)

    def finish(self) -> None:
        for each in self.gradients:
            each.end_reduce()
        if self.done is not None:
            self.done()

    def abandon(self) -> None:
        for each in self.gradients:
            with suppress(RuntimeError):  # see Schedule.abandon
                each.abandon_reduce()


class Schedule:
    """Prefetch and reductions of all units under one root.

    ``iteration_is_over``: units have said so, and no pass with gradients has begun since.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, torch.device], Lane] = {}
        # By outermost unit, and whether it is with gradients.
        self._forwards: dict[tuple[Scheduled, bool], Order] = {}
        self._forward = Order()  # of the pass that runs
        self._backward = Order()
        self._inside: list[Scheduled] = []  # units whose forward runs, outermost first
        self._prefetched: list[ShardBuffer] = []
        self._reductions: deque[Sequence[_Reduction]] = deque()  # begun; those together are one
        self._waiting: list[_Reduction] = []  # until more have come
        self._task = NO_BACKWARD  # the backward pass that is under way, by autograd's number
        self._passes: list[int] = []  # it and those that it runs inside of, outermost first
        self.iteration_is_over = True
        self._known_before: dict[Order, Sequence[Entry]] = {}  # this iteration
        self.packed = PackedWeights()
        self.units: list[Scheduled] = []  # all under the root

    def enter_forward(self, unit: Scheduled) -> None:
        if backward_id() != NO_BACKWARD:
            self.follow_backward()
            return
        if not self._inside:
            self.settle()
            self._passes.clear()  # of passes that have failed
            key = (unit, torch.is_grad_enabled())
            self._forward = self._forwards.setdefault(key, Order())
            self._forward.begin()
            if self.iteration_is_over:
                orders = (*self._forwards.values(), self._backward)
                self._known_before = {order: order.known for order in orders}
                self.packed.forget()
                self.iteration_is_over = not torch.is_grad_enabled()
        self._inside.append(unit)

    def gathered(self, unit: Scheduled, buffers: Sequence[ShardBuffer]) -> None:
        """Begin to gather what comes after these buffers, which had to be gathered."""
        if backward_id() != NO_BACKWARD:
            self.follow_backward()
            upcoming = self._backward.note(unit, buffers) if buffers else []
        else:
            # All of them: what was here already will have to be gathered in the next iteration.
            upcoming = self._forward.note(unit, unit.group.buffers)
        if unit.group.options.overlap:
            self._prefetch(unit, upcoming)

    def leave_forward(self, unit: Scheduled) -> None:
        if unit not in self._inside:
            return
        # Inner units that an exception has kept from leaving are outside now as well.
        del self._inside[self._inside.index(unit) :]
        if not self._inside:
            self._forward.end()
            self._drop_prefetched()
            for other in self.units:
                other.end_pass()

    def share_lanes(self, other: "Schedule") -> None:
        """Work on the streams of another root, which does not work at the same time."""
        self._lanes = other._lanes

    def make_room(self) -> None:
        """Wait for reductions until one more whole gradient buffer may be made."""
        while len(self._reductions) >= MAX_FULL_GRADS:
            self._finish_first()

    def reduce(
        self,
        unit: Scheduled,
        gradients: Sequence[Gradients],
        how: How,
        done: Callable[[], None] | None,
    ) -> None:
        """Begin to reduce the gradients of a unit's buffers; all is over before backward is."""
        reduction = _Reduction(unit, gradients, how, done)
        if not unit.group.options.overlap:
            self._begin_reductions()
            for each in gradients:
                each.begin_reduce(None, how)
            self._reductions.append([reduction])
            self.finish_reduction(unit)
            return
        size = sum(each.whole_bytes for each in (reduction, *self._waiting))
        if not (reduction.waits and is_short(size)):
            self._begin_reductions()
        self._waiting.append(reduction)
        if not (reduction.waits and is_short(reduction.whole_bytes)):
            self._begin_reductions()

    def _begin_reductions(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        entries = [(each, reduction.how) for reduction in waiting for each in reduction.gradients]
        for device, of_device in groupby(entries, lambda entry: entry[0].device):
            begin_reductions(of_device, self._lane("reduce", device))
        self._reductions.append(waiting)

    def finish_reduction(self, unit: Scheduled) -> None:
        """Wait for the gradients of one unit, and of those that began before it."""
        if any(reduction.unit is unit for reduction in self._waiting):
            self._begin_reductions()
        while any(reduction.unit is unit for reduction in chain.from_iterable(self._reductions)):
            self._finish_first()

    def _finish_first(self) -> None:
        for reduction in self._reductions.popleft():
            reduction.finish()

    def settle(self) -> None:
        """Wait for whatever is under way, and drop what nobody has used."""
        self._task = NO_BACKWARD
        self._drop_prefetched()
        self._begin_reductions()
        while self._reductions:
            self._finish_first()

    def abandon(self) -> None:
        """Forget an iteration that an exception has ended, here or on another rank.

        All ranks go by the order that they knew before it: some may have come further than others.
        """
        self._task = NO_BACKWARD
        self._passes.clear()
        self._inside.clear()
        for order in (*self._forwards.values(), self._backward):
            order.known = self._known_before.get(order, ())
            order.begin()
        self.iteration_is_over = True
        self.packed.forget()
        while self._prefetched:
            # Another rank may be gone: then its group is of no use any more, and whoever abandons
            # the iteration has an error to tell already.
            with suppress(RuntimeError):
                self._prefetched.pop().drop_prefetched()
        self._waiting.clear()
        while self._reductions:
            for reduction in self._reductions.popleft():
                reduction.abandon()

    def queue_up(self, buffer: ShardBuffer) -> None:
        """Let a gather on the current stream have its turn; see Note [Collectives in a graph]."""
        self._lane("gather", buffer.device).join()

    def _lane(self, kind: str, device: torch.device) -> Lane:
        key = ("collectives" if device.type == "cuda" and is_capturing() else kind, device)
        if key not in self._lanes:
            # Of high priority, so that a collective need not wait until kernels leave room.
            on_gpu = device.type == "cuda"
            stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
            self._lanes[key] = Lane(stream)
        return self._lanes[key]

    def _prefetch(self, current: Scheduled, entries: Sequence[Entry]) -> None:
        missing: list[ShardBuffer] = []
        for unit, of_unit in groupby(entries, itemgetter(0)):
            of_this = unit.missing(buffer for _, buffer in of_unit)
            if not of_this and unit is not current:
                break
            missing += of_this
        for device, buffers in groupby(missing, lambda buffer: buffer.device):
            begin_unshard([*buffers], self._lane("gather", device))
        self._prefetched += missing

    def _drop_prefetched(self) -> None:
        while self._prefetched:
            self._prefetched.pop().drop_prefetched()

    def follow_backward(self) -> None:
        """See to it that the backward pass under way leaves nothing behind, and all units know."""
        task = backward_id()
        if task == self._task or backward_node() is None:  # in a last callback, behind ours
            return
        if self._task != NO_BACKWARD:
            # A backward pass inside another one, or one that has failed.
            self.settle()
        self._task = task
        if task not in self._passes:
            self._passes.append(task)
        self._backward.begin()
        when_backward_ends(partial(self._end_backward, task))

    def _end_backward(self, task: int) -> None:
        self._backward.end()
        self.settle()
        if task in self._passes:
            del self._passes[self._passes.index(task) :]
        if self._passes:
            return  # it ran inside another one (a reentrant checkpoint), which is not over
        for unit in self.units:
            unit.leave_backward()
