"""What units under one root share: when they gather and reduce, and where their shards lie.

They gather ahead of their use, and reduce while others compute; shards are neighbours in memory.
Before that the ranks' models are checked against each other.

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

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import unwrapped
from graphfsdp.base.joined import is_short
from graphfsdp.base.memory import neighbour_starts
from graphfsdp.base.rank_agreement import timeout_of
from graphfsdp.base.streams import Lane, is_capturing
from graphfsdp.base.torch_internals import (
    NO_BACKWARD,
    all_groups,
    backward_id,
    backward_node,
    is_in_compiled_autograd,
    key_of,
    local_tensor_of,
    not_traced,
    num_users,
    when_backward_ends,
)
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.buffer import ShardBuffer, begin_unshard
from graphfsdp.sharding.gradients import Gradients, How, Memory, begin_reductions
from graphfsdp.sharding.packing import PackedWeights

# Whole gradient buffers that may be alive: one is being reduced, one is being filled.
MAX_FULL_GRADS = 2


# A Unit, whose class needs this module.
Scheduled = Any
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
        return all(each.joinable is not None for each in self.gradients)

    @property
    def whole_bytes(self) -> int:
        return sum(each.joinable.nbytes for each in self.gradients if each.joinable is not None)

    def finish(self) -> None:
        for each in self.gradients:
            each.end_reduce()
        if self.done is not None:
            self.done()


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
                self._known_before = self.orders()
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
        unit.group.reduced_at = time.monotonic_ns()
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
            group = reduction.unit.group
            if group.has_gradient_hooks:
                self.queue_up(group.buffers[0])  # they may talk to other ranks
            reduction.finish()

    def settle(self) -> None:
        """Wait for whatever is under way, and drop what nobody has used."""
        self._task = NO_BACKWARD
        self._drop_prefetched()
        self._begin_reductions()
        while self._reductions:
            self._finish_first()

    def orders(self) -> dict[Order, Sequence[Entry]]:
        """Return what the next iteration goes by."""
        return {order: order.known for order in (*self._forwards.values(), self._backward)}

    def go_by(self, known: Mapping[Order, Sequence[Entry]]) -> None:
        for order in self.orders():
            order.known = known.get(order, ())
            order.begin()

    def abandon(self) -> None:
        """Forget an iteration that an exception has ended, here or on another rank.

        All ranks go by the order that they knew before it: some may have come further than others.
        """
        self._task = NO_BACKWARD
        self._passes.clear()
        self._inside.clear()
        self.go_by(self._known_before)
        self.iteration_is_over = True
        self.packed.forget()
        under_way = [buffer.drop_prefetched for buffer in self._prefetched]
        for reduction in chain.from_iterable(self._reductions):
            under_way += [each.abandon_reduce for each in reduction.gradients]
        self._prefetched.clear()
        self._waiting.clear()
        self._reductions.clear()
        for wait in under_way:
            # Another rank may be gone: then its group is of no use any more, and whoever abandons
            # the iteration has an error to tell already.
            with suppress(RuntimeError):
                wait()

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
        if is_in_compiled_autograd():
            raise ConfigError(
                "torch's compiled autograd runs a backward pass of sharded units, and does not say "
                "when it is over, so that gradients would come an iteration late. Remedy: leave "
                "torch._dynamo.config.compiled_autograd off; modules that are compiled have "
                "compiled backward passes without it"
            )
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

    @not_traced
    def _end_backward(self, task: int) -> None:
        self._backward.end()
        self.settle()
        if task in self._passes:
            del self._passes[self._passes.index(task) :]
        if self._passes:
            return  # it ran inside another one (a reentrant checkpoint), which is not over
        for unit in self.units:
            unit.leave_backward()


_Kind = tuple[torch.dtype, torch.dtype | None, Memory]  # of main weights, main grads


def set_up(root: nn.Module, units: Sequence[Scheduled]) -> None:
    """Let all units of a model, in the order of its modules, work together.

    Main weights of all units are neighbours in one storage per dtype, main grads likewise and in
    the same order, so that an optimizer can run over the whole model in a handful of kernels.

    ConfigError: a unit is in the middle of work, or is another one on another rank.
    """
    names = {id(module): name for name, module in root.named_modules()}
    for unit in units:
        # One of a unit's modules may be called on its own, outside of the others' root.
        unit.group.names = [names.get(id(m), type(m).__name__) for m in unit.modules]
        unit.is_root = root in unit.modules
    for unit in units:
        unit.refuse_busy("set up with the module around it", unsharded=False)
    _refuse_other_structure(units)
    pinned = [unit for unit in units if unit.pinned]
    for unit in pinned:
        unit.reshard()
    with torch.inference_mode(False):  # what is made here is trained later
        move_together(units)
        _join_schedules(units)
    for unit in pinned:
        unit.unshard()


def _join_schedules(units: Sequence[Scheduled]) -> None:
    """Let all units go by one schedule, and give all-gathers communicators of their own."""
    schedule = Schedule()
    for unit in units:
        unit.schedule = schedule
        options = unit.group.options
        for buffer in unit.group.buffers:
            if buffer.packing is not None:
                schedule.packed.add(buffer.packing)
            if not buffer.sharded:
                continue
            if options.overlap:
                buffer.gather_group = _gather_group(buffer.mesh.inner, buffer.mesh.inner.size())
            few, inner = int(options.reshard_after_forward or 0), buffer.mesh.inner
            if few > 1 and buffer.extension is None and not inner.size() % few:
                buffer.few_ranks = _gather_group(inner, few)
    schedule.units += units


def _refuse_other_structure(units: Sequence[Scheduled]) -> None:
    """Compare with the other ranks: a rank that differs would hang or mix up numbers."""
    found = (group for unit in units for group in unit.group.groups)
    groups = dict.fromkeys(group for group in found if group.size() > 1)
    problem: str | None = None
    for group in groups:
        mine = [
            line
            for unit in units
            if group in unit.group.groups
            for line in unit.group.describe(group)
        ]
        # A rank that finds something goes on: those that share another group with it wait.
        everyone: list[tuple[str | None, list[str]]] = [(None, [])] * group.size()
        dist.all_gather_object(everyone, (problem, mine), group)
        ranks = dist.get_process_group_ranks(group)
        for rank, (theirs, lines) in zip(ranks, everyone, strict=True):
            if problem is None and theirs is None and lines != everyone[0][1]:
                theirs = (
                    f"rank {rank} holds another model than rank {ranks[0]}, so their "
                    f"collectives would not fit together: "
                    f"{_difference(everyone[0][1], lines, ranks[0])}. Remedy: build the same "
                    "model with the same dtypes and units on every rank"
                )
            problem = problem or theirs
    if problem is not None:
        raise ConfigError(problem)


def move_together(units: Sequence[Scheduled], in_place_of_meta: torch.device | None = None) -> None:
    """Give memory on that device to the shards that are on the meta device, too.

    Shards that somebody holds, in a state dict that was taken before, stay where they are.
    """
    for unit in units:
        unit.group.take_values()
    held = _held_elsewhere(units)
    kinds: dict[_Kind, list[ShardBuffer]] = {}
    for unit in units:
        unit.group.follow_requires_grad()
        for buffer in unit.group.buffers:
            if in_place_of_meta is not None:
                buffer.leave_meta(in_place_of_meta)
            if not buffer.main.is_meta and key_of(buffer.main.untyped_storage()) in held:
                continue
            grad_dtype = None if buffer.grad is None else buffer.grad.dtype
            kind = (buffer.main.dtype, grad_dtype, buffer.memory)
            kinds.setdefault(kind, []).append(buffer)
    for buffers in kinds.values():
        mains = _neighbours(buffers, [buffer.main for buffer in buffers])
        grads: list[Tensor | None] = [None] * len(buffers)
        found = [buffer.grad for buffer in buffers if buffer.grad is not None]
        if found:
            grads = [*_neighbours(buffers, found)]
        for buffer, main, grad in zip(buffers, mains, grads, strict=True):
            buffer.move(main, grad)
    for unit in units:
        unit.group.bind_views()


def _held_elsewhere(units: Sequence[Scheduled]) -> set[int]:
    """Return keys of the storages of main weights at which others than the units look."""
    ours: dict[int, int] = {}
    for unit in units:
        locals_ = (unwrapped(local_tensor_of(item.param)) for item in unit.group.managed)
        for tensor in (*(buffer.main for buffer in unit.group.buffers), *locals_):
            key = key_of(tensor.untyped_storage())
            ours[key] = ours.get(key, 1) + 1  # one is what asks for the storage
    return {key for key in ours if num_users(key) > ours[key]}


def _difference(first: list[str], other: list[str], rank: int) -> str:
    pairs = zip_longest(first, other, fillvalue="nothing")
    line, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return f"rank {rank} has {line}, the other has {theirs}"


def _neighbours(buffers: list[ShardBuffer], tensors: list[Tensor]) -> list[Tensor]:
    """Return views of one new storage, as long as the given tensors, one after the other."""
    numels = [tensor.numel() for tensor in tensors]
    starts = neighbour_starts(numels, tensors[0].element_size())
    flat = buffers[0].new_zeros(starts[-1], tensors[0].dtype)
    return [flat.narrow(0, *place) for place in zip(starts, numels, strict=False)]


def _gather_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """A communicator for all-gathers of a group, or of so many neighbours in it, made once.

    All ranks must call this together. torch keeps it with all others, so
    ``destroy_process_group()`` closes it. The group itself where one cannot be made: for one rank,
    or where the ranks hold different numbers of groups, from which torch takes the name.
    """
    if group.size() == 1:
        return group
    description = f"graphfsdp all-gather of {group.group_name} by {size}"
    found = next((pg for pg in all_groups() if pg.group_desc == description), None)
    everyone: list[tuple[int, bool]] = [(0, False)] * group.size()
    dist.all_gather_object(everyone, (len(all_groups()), found is not None), group)
    if all(has for _, has in everyone):
        assert found is not None
        return found
    if len(set(everyone)) > 1:
        return group
    first = group.rank() // size * size
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group)[first : first + size],
        timeout=timeout_of(group),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,  # only the ranks of this group are here
        group_desc=description,
    )
    return made
