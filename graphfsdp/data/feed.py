"""Batches that are there before they are asked for, on the device before a replay needs them."""

import copy
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.torch_internals import tree_map_only
from graphfsdp.errors import ConfigError


class Feed:
    """Iterates over a loader, ahead of the training, and says how long the training waited.

    Takes any iterable: ``TokenBatches``, a ``DataLoader``, torchdata's ``StatefulDataLoader``.
    A thread takes batches from it while the model computes. For a GPU each is then copied, from
    page-locked memory and on a stream of its own, while the iteration before it runs: into new
    memory, never into what a graph reads, which is written in the stream's order by the step.
    What the loader has yielded is read before it is asked again, so it may fill the same tensors
    anew each time.

    In a checkpoint (``objects={"data": feed}``) it keeps the loader's state as it was after the
    batch that was handed out last, whatever was taken ahead.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str | None = None, *, ahead: int = 2
    ) -> None:
        """Start nothing yet.

        Args:
            loader: Yields batches; lists, tuples and dicts of tensors, and what else
                there is. If it has ``state_dict``, this is asked for after each batch.
            device: Where the tensors are handed out; as they come, if it is None or a CPU.
            ahead: Batches that the thread holds, at least 1.
        """
        if ahead < 1:
            raise ConfigError(f"ahead must be at least 1, got {ahead}")
        self._loader: Any = loader
        self._ahead = ahead
        self._device = None if device is None else torch.device(device)
        on_gpu = self._device is not None and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # of the copies
        self._state: Any = None
        self._running = 0
        self.waited_s = 0.0  # that whoever iterates has spent in here

    def __iter__(self) -> Generator[Any, None, None]:
        """Go through the loader once, from where it is."""
        # What is its own iterator goes on from where it was; of others each loop begins anew.
        goes_on = isinstance(self._loader, Iterator) and hasattr(self._loader, "load_state_dict")
        if goes_on:
            self._state = copy.deepcopy(self._loader.state_dict())
        source = _Source(self._loader, self._ahead, pins=self._stream is not None)
        self._running += 1
        try:
            began = time.perf_counter()
            item = self._copied(source.take())
            while item is not None:
                if item.error is not None:
                    raise item.error
                following = None
                if self._stream is not None:
                    following = self._copied(source.take(waits=False))
                    self._hand_over(item)
                self._state = item.state
                self.waited_s += time.perf_counter() - began
                yield item.batch
                began = time.perf_counter()
                item = following if following is not None else self._copied(source.take())
        finally:
            self._running -= 1
            source.close()
            if goes_on:
                self._loader.load_state_dict(self._state)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> Any:
        """Return the loader's state after the batch that was handed out last."""
        if self._state is None:
            return self._loader.state_dict()
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from a state; the next ``iter`` begins there.

        Raises:
            ConfigError: the loader is being iterated over, and batches were taken already.
        """
        if self._running:
            raise ConfigError(
                "a state was loaded into a Feed that is being iterated over, which has taken "
                "batches ahead. Remedy: load before the loop, or end the loop first"
            )
        self._loader.load_state_dict(state)
        self._state = None

    def _copied(self, item: "_Item | None") -> "_Item | None":
        """Copy a batch to a GPU, behind nothing that runs on it."""
        if self._stream is None or item is None or item.error is not None:
            return item

        def copy_of(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            item.batch = tree_map_only(Tensor, copy_of, item.batch)
            item.copied = self._stream.record_event()
        return item

    def _hand_over(self, item: "_Item") -> None:
        """Have the current stream wait for the copy, and the memory live as long as it reads."""
        stream = torch.cuda.current_stream(self._device)
        assert item.copied is not None
        stream.wait_event(item.copied)
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), item.batch)


@dataclass
class _Item:
    """What a loader gave: a batch and the state after it, or an error."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None
    copied: torch.cuda.Event | None = None


class _Source:
    """Takes batches from a loader, in a thread.

    Note [Signals]: a handler that raises (Ctrl-C) in between the lines of ``queue.Queue`` or of an
    Event leaves its lock taken, and the other thread waits for ever. ``SimpleQueue`` has none.
    """

    def __init__(self, loader: Any, ahead: int, *, pins: bool) -> None:
        self._loader = loader
        self._pins = pins
        self._iterator: Iterator[Any] | None = None
        self._closed = self._ended = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # for so many batches more
        for _ in range(ahead):
            self._room.put(None)
        # What a loader does on a GPU goes where it would go in the loop itself: device and stream
        # are each thread's own.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._work, name="graphfsdp-feed", daemon=True)
        self._thread.start()

    def take(self, *, waits: bool = True) -> _Item | None:
        """Return the next batch, None after the last, or if it is not there and nobody waits."""
        if self._ended:
            return None
        try:
            item = self._queue.get(block=waits)
        except queue.Empty:
            return None
        self._room.put(None)
        self._ended = item is None or item.error is not None
        return item

    def close(self) -> None:
        self._closed = True
        self._room.put(None)  # it may wait for that
        self._thread.join()

    def _work(self) -> None:
        item: _Item | None = _Item()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while item is not None and item.error is None and not self._closed:
                item = self._pull()
                self._room.get()
                self._queue.put(item)

    def _pull(self) -> _Item | None:
        try:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = tree_map_only(Tensor, self._own, next(self._iterator))
            if not hasattr(self._loader, "state_dict"):
                return _Item(batch)
            return _Item(batch, copy.deepcopy(self._loader.state_dict()))
        except StopIteration:
            return None
        except BaseException as error:  # whoever waits for the batch gets it
            return _Item(error=error)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a copy that the loader does not write into, for a GPU in page-locked memory.

        Also of what is page-locked: the loader may fill it with the next batch before the copy to
        the device, which nobody waits for, has run.
        """
        if not self._pins or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return tensor.detach().clone()
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
