"""What was recorded for one kind of batch, and the few of them that a step keeps."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from graphfsdp._capture.backend import Graph
from graphfsdp._capture.guards import Guards
from graphfsdp._capture.results import Results
from graphfsdp._capture.static_inputs import StaticInputs


class Recording:
    """One kind of batch: its static inputs, and its graph once there is one.

    Attributes:
        inputs: Where such batches are copied to.
        num_microbatches: Parts that they are split into.
        num_eager: Calls with such batches that ran eagerly.
        graph: The graph, or None before the capture.
        results: The form of what the iteration returns.
        num_verified: Replays that were compared with an eager run.
        guards: What must be as it was when the graph was made; None before that.
        capture_ms: Milliseconds that the capture took.
    """

    def __init__(self, inputs: StaticInputs, num_microbatches: int) -> None:
        self.inputs = inputs
        self.num_microbatches = num_microbatches
        self.num_eager = 0
        self.num_verified = 0
        self.graph: Graph | None = None
        self.guards: Guards | None = None
        self.results = Results()
        self.capture_ms: float | None = None

    def again(self) -> "Recording":
        """Return one with the same inputs and no graph, for a run beside this one's."""
        return Recording(self.inputs, self.num_microbatches)

    def close(self) -> None:
        """Give the graph back."""
        graph, self.graph = self.graph, None
        self.guards = None
        if graph is not None:
            graph.close()


class Recordings:
    """The recordings of a step, the least recently used of them first to go."""

    def __init__(self, max_graphs: int) -> None:
        """Prepare.

        Args:
            max_graphs: Recordings that are kept at a time.
        """
        self._max_graphs = max_graphs
        self._entries: OrderedDict[int, Recording] = OrderedDict()  # oldest use first

    def __iter__(self) -> Iterator[Recording]:
        """Yield the recordings, least recently used first."""
        return iter(self._entries.values())

    def __contains__(self, entry: object) -> bool:
        return id(entry) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def latest(self) -> Recording | None:
        """The one that was used last."""
        return next(reversed(self._entries.values()), None)

    @property
    def num_graphs(self) -> int:
        """Recordings that have their graph."""
        return sum(entry.graph is not None for entry in self)

    def load(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> Recording | None:
        """Copy a batch to the inputs that were made for its kind.

        Returns:
            The recording of such batches, or None, and then nothing was copied.
        """
        for entry in reversed(self._entries.values()):
            if entry.num_microbatches == num_microbatches and entry.inputs.accept(args, kwargs):
                self._entries.move_to_end(id(entry))
                return entry
        return None

    def add(self, entry: Recording) -> Recording | None:
        """Keep one more; return the one that had to go for it, if any, closed."""
        self._entries[id(entry)] = entry
        if len(self._entries) <= self._max_graphs:
            return None
        _, oldest = self._entries.popitem(last=False)
        oldest.close()
        return oldest

    def remove(self, entry: Recording) -> None:
        """Close one and let go of it."""
        self._entries.pop(id(entry), None)
        entry.close()

    def close(self) -> None:
        """Close all and let go of them."""
        while self._entries:
            self._entries.popitem()[1].close()


__all__ = ["Recording", "Recordings"]
