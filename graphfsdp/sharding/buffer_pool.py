"""Fixed places for the whole buffers of units that live only for a while.

Note [Lifetimes by reference]: nobody says when a buffer is free. A place is free when nobody but
the pool refers to its storage any more, and that is looked up whenever memory is asked for: so
the pool sees what a model, autograd or a communication thread still holds, an alias that a user
keeps is never overwritten, and what cannot have its place is allocated as ever. Each place has a
storage of its own, over memory that it shares with places of other times.

Note [Steps]: time is counted in requests. An iteration that did not find its places (as the first
one, another order of units, a unit that is left out) has them allocated; the one after it is
allocated wholly and traced, and when its backward pass ends places are planned from which buffers
were alive at which request. A plan that goes on not to fit is remade ever more rarely. gloo's
threads let go of a buffer a little late; while an iteration is traced for a plan, the pool waits
for them.

Note [Recordings]: on a CPU, whatever runs under a dispatch mode gets fresh memory, since a
recording plans all of its memory by itself, with these buffers among it (
capture/cpu/memory.py, by the same algorithm), and what undoes a warm-up would copy the pool. A CUDA
graph holds the addresses of the places, so it keeps the plan that it was captured with. Nothing is
planned inside a capture, where the memory would lie in the graph's private pool, and a capture is
served as the warm-up before it was, so that both run the same operators: by a plan that was made
before the last warm-up, or not at all. Not run on a GPU yet.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp.base.host_memory import advise_huge_pages
from graphfsdp.base.memory_plan import Lifetime, plan_memory, round_up
from graphfsdp.base.streams import is_capturing, keep_for_graph

ALIGNMENT_BYTES = 512  # as the caching allocator of CUDA
_MAX_REQUESTS = 1 << 14  # of an iteration; a longer one is not planned
_RELEASE_S = 0.01
_OWN_REFERENCES = 1  # to the storage of a place that nobody uses

_Key = tuple[Hashable, int]  # who asks, and for the how-manyth time in this iteration


@dataclass(eq=False)
class _Place:
    storage: torch.UntypedStorage  # over the stretch, and nothing else
    num_bytes: int  # what it was planned for
    neighbours: "list[_Place]"  # places that share some of its memory

    @property
    def is_free(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) <= _OWN_REFERENCES

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor over it, with a version counter of its own."""
        fresh = torch.empty(0, dtype=dtype, device=self.storage.device)
        return fresh.set_(self.storage, 0, (numel,), (1,))


@dataclass
class _Request:
    key: _Key
    num_bytes: int
    device: torch.device
    start: int  # number of the request
    place: _Place | None  # where it lies in the pool; None if it was allocated
    reference: StorageWeakRef | None  # its storage if it was allocated
    end: int | None = None  # last request at which it was alive; None as long as it is

    @property
    def is_alive(self) -> bool:
        if self.place is not None:
            return not self.place.is_free
        return self.reference is not None and not self.reference.expired()


@dataclass(frozen=True)
class PoolStats:
    """Requests that got their place (hits), or were allocated, are since the last plan.

    ``peak_bytes``: the most bytes of the planned iteration that were alive at a time: no pool for
    it can be smaller.
    """

    num_bytes: int
    peak_bytes: int
    num_plans: int
    num_hits: int
    num_misses: int


class BufferPool:
    def __init__(self) -> None:
        self._places: dict[_Key, _Place] = {}
        self._stream: int | None = None  # the CUDA stream that the plan is for
        self._kept: list[object] = []  # plans that a CUDA graph refers to, captured by hand
        self._requests: list[_Request] = []
        self._alive: list[_Request] = []
        self._counts: dict[Hashable, int] = {}
        self._is_traced = False
        self._num_plans = self._num_bytes = self._peak_bytes = 0
        self._num_hits = self._num_misses = 0
        self._missed = False  # in this iteration
        self._is_planned_from = False  # this iteration, none of whose requests gets a place
        self._patience = self._num_waited = 0

    @property
    def stats(self) -> PoolStats:
        return PoolStats(
            self._num_bytes, self._peak_bytes, self._num_plans, self._num_hits, self._num_misses
        )

    def begin(self, *, trains: bool) -> None:
        """Begin an iteration; a forward alone is only served."""
        self._requests, self._alive, self._counts = [], [], {}
        self._is_traced, self._missed = trains, False
        if not trains:
            return
        if not is_capturing():
            self._is_planned_from = self._num_waited > self._patience
        if self._is_planned_from:
            self._places = {}

    def keep_for_graph(self) -> None:
        """Have a graph that is being captured keep the places that it may use."""
        if self._places:
            keep_for_graph(self._places, self._kept)

    def end(self) -> None:
        """Plan from the iteration that is over if it was run for that."""
        if not (self._is_traced and self._missed) or is_capturing():
            return
        self._missed = False
        if not self._is_planned_from:
            self._num_waited += 1
        elif len(self._requests) < _MAX_REQUESTS:
            with _disable_current_modes():  # no operator of the iteration, which may be compared
                self._plan()

    def take(self, owner: Hashable, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [numel] with undefined contents, the caller's as long as anybody refers to it.

        The owner is the same in each iteration. Capture: on CUDA memory from before the capture
        where there is a place; else, and on a CPU always, an allocation inside it.
        """
        if not numel or _is_recorded_on_cpu(device):
            return torch.empty(numel, dtype=dtype, device=device)
        key = (owner, self._counts.get(owner, 0))
        self._counts[owner] = key[1] + 1
        num_bytes = numel * dtype.itemsize
        place = self._place_for(key, num_bytes, device)
        if place is None:
            tensor = torch.empty(numel, dtype=dtype, device=device)
            reference = StorageWeakRef(tensor.untyped_storage())
            self._num_misses += 1
            self._missed = True
        else:
            tensor, reference = place.tensor(numel, dtype), None
            self._num_hits += 1
        if self._is_traced and len(self._requests) < _MAX_REQUESTS:
            self._end_the_dead()
            request = _Request(key, num_bytes, device, len(self._requests), place, reference)
            self._requests.append(request)
            self._alive.append(request)
        return tensor

    def dropped(self, owner: Hashable) -> None:
        """Note that the owner needs its last buffer no more; others may still refer to it."""
        if not self._is_planned_from:
            return
        deadline = time.monotonic() + _RELEASE_S
        for request in self._alive:
            while request.key[0] == owner and request.device.type == "cpu" and request.is_alive:
                if time.monotonic() > deadline:
                    return
                time.sleep(_RELEASE_S / 50)

    def _place_for(self, key: _Key, num_bytes: int, device: torch.device) -> _Place | None:
        place = self._places.get(key)
        if place is None or place.num_bytes != num_bytes or place.storage.device != device:
            return None
        if _stream_of(device) != self._stream:
            return None  # nothing orders what this stream does after what the other one did
        if not (place.is_free and all(other.is_free for other in place.neighbours)):
            return None
        return place

    def _end_the_dead(self) -> None:
        alive = []
        for request in self._alive:
            if request.is_alive:
                alive.append(request)
            else:
                request.end = len(self._requests) - 1
        self._alive = alive

    def _plan(self) -> None:
        self._end_the_dead()
        last = len(self._requests)
        self._places = {}
        self._num_bytes = self._peak_bytes = 0
        for device in dict.fromkeys(request.device for request in self._requests):
            requests = [request for request in self._requests if request.device == device]
            self._plan_on(device, requests, last)
            self._stream = _stream_of(device)
        self._num_plans += 1
        self._num_hits = self._num_misses = 0
        self._num_waited, self._patience = 0, 2 * self._patience + (self._num_plans > 2)

    def _plan_on(self, device: torch.device, requests: Sequence[_Request], last: int) -> None:
        # What outlives the iteration is there at the beginning of the next one as well.
        lifetimes = [
            Lifetime(
                0 if request.end is None else request.start,
                last if request.end is None else request.end,
                round_up(request.num_bytes, ALIGNMENT_BYTES),
            )
            for request in requests
        ]
        plan = plan_memory(lifetimes, num_retries=max(20, 20000 // (1 + len(lifetimes))))
        memory = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
        advise_huge_pages(memory.untyped_storage())
        placed: list[tuple[int, int, _Place]] = []
        for request, lifetime, start in zip(requests, lifetimes, plan.offsets, strict=True):
            end = start + lifetime.num_bytes
            storage = _storage_over(memory[start : start + request.num_bytes])
            place = _Place(storage, request.num_bytes, [])
            for low, high, other in placed:
                if low < end and start < high:
                    place.neighbours.append(other)
                    other.neighbours.append(place)
            placed.append((start, end, place))
            self._places[request.key] = place
        self._num_bytes += plan.num_bytes
        self._peak_bytes += plan.peak_bytes


def take(
    pool: BufferPool | None, owner: Hashable, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if pool is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return pool.take(owner, numel, dtype, device)


def _storage_over(memory: Tensor) -> torch.UntypedStorage:
    """Return a storage of its own over a stretch of memory, which it keeps alive."""
    if memory.is_meta:  # there is nothing to share
        return torch.empty_like(memory).untyped_storage()
    # DLPack's way to share it. The rules of a capture refuse Tensor.__dlpack__, which from_dlpack
    # would call: it hands a tensor to somebody who may read it on the host.
    shared: Tensor = torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(memory))
    return shared.untyped_storage()


def _is_recorded_on_cpu(device: torch.device) -> bool:
    return device.type == "cpu" and torch._C._len_torch_dispatch_stack() > 0


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
