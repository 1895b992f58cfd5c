"""What a graph backend is: the words that both kinds of graph share."""

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from graphfsdp._capture.trace.program_facts import ProgramFacts

Iterate = Callable[[], list[Tensor]]  # runs one iteration, returns its detached results
Check = Callable[[Callable[[Tensor], bool]], None]  # given a test "did the recording touch it?"


@dataclass(frozen=True)
class GraphFacts:
    """What a recording turned out to be; what is not told here, CaptureReport tells.

    Attributes:
        describe: Describes the nodes, which takes some time when it is first called.
        bound: How far compiled replays may be from eager; 0: equal bit for bit.
        written: Memory from before the recording that replays write; on a CPU nobody asks.
    """

    num_nodes: int | None
    num_ops: int | None
    op_counts: dict[str, int] = field(default_factory=dict)
    pool_bytes: int = 0
    num_escapes: int = 0
    describe: Callable[[], ProgramFacts] | None = None
    compiled: tuple[str, ...] = ()
    bound: float = 0.0
    written: Sequence[torch.UntypedStorage] = ()

    @property
    def program(self) -> ProgramFacts | None:
        return None if self.describe is None else self.describe()


class Effect(enum.Enum):
    """How much of an iteration the last replay has left in memory; the value is for people."""

    NONE = (
        "the replay was undone: parameters, buffers, optimizer state and generators are as they "
        "were before the call; gradients, half overwritten, were taken off (None)"
    )
    PART = (
        "the replay stopped while it updated weights: some parameters and their optimizer state "
        "may have been stepped and others not. Remedy: load model and optimizer from the last "
        "checkpoint, close this step, and capture again"
    )
    ALL = "the iteration took effect as a whole; only its results are lost"


class Graph(Protocol):
    facts: GraphFacts

    @property
    def effect(self) -> Effect:
        """What the last replay has done, also if it raised."""
        ...

    def replay(self) -> list[Tensor]:
        """Run the recording once; the results are the caller's to keep."""
        ...

    def compile(self) -> None:
        """Compile, if it was asked for; called once, when the capture stands on all ranks."""
        ...

    def close(self) -> None:
        """Give the memory back; no replay after this."""
        ...


class MemoryUndo(Protocol):
    """What it takes to put memory back after a failed iteration that ran for real."""

    def watching(self) -> AbstractContextManager[object]:
        """Run the body, the iteration, so that it can be undone."""
        ...

    def roll_back(self) -> None:
        """Write everything back, at the addresses that it had."""
        ...


class GraphBackend(Protocol):
    name: str
    device: torch.device

    def on_capture_stream(self) -> AbstractContextManager[list[Tensor]]:
        """Run the body on the stream that captures, ordered with the current one.

        Into the list go the results that somebody will hold, and read on the current stream.
        """
        ...

    def give_back_memory(self, *, workspaces: bool = True) -> None:
        """Give back memory of the device that nobody uses, unless a recording is under way.

        ``workspaces``: those of libraries too, which lie in the middle of it and are made anew.
        """
        ...

    def begin_undo(self, state: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> MemoryUndo:
        """Prepare for an iteration that may fail.

        ``state`` is what it is known to write; nobody has seen the contents of ``scratch``.
        """
        ...

    def record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
    ) -> tuple[Graph, list[Tensor]]:
        """Record one iteration, which also takes effect exactly once; its results are returned.

        ``check`` is the last thing that can fail: it raises if the iteration left something behind
        that a replay could not repeat. ``collective``: other ranks run the same iteration at the
        same time. A replay that fails need not put back old contents of ``scratch``. After a
        CaptureError the caller undoes what has run.
        """
        ...
