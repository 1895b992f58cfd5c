"""The CPU backend: the same capture semantics without a GPU."""

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from graphfsdp._capture.cpu.measure import measure_replay
from graphfsdp._capture.cpu.memory import Arena
from graphfsdp._capture.cpu.program import ProgramBuilder, Replay
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.ranks.collective_order import CollectiveOrder
from graphfsdp._capture.trace.backend import Check, Effect, Graph, GraphFacts, Iterate
from graphfsdp._capture.trace.storages import refuse_dropped_tensors
from graphfsdp._capture.trace.values import Value
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp._capture.undo.replay_undo import ReplayUndo
from graphfsdp._capture.undo.undo_arena import give_back_freed_pages
from graphfsdp._capture.undo.undo_plan import plan_undo
from graphfsdp.base.collector import without_collector
from graphfsdp.config import UndoReplays
from graphfsdp.errors import CaptureError, PhaseError

# A worker thread needs microseconds; what lives longer than this is kept by somebody.
_RELEASE_S = 0.1


class CpuGraph:
    """A replayable program over operators."""

    def __init__(
        self, replay: Replay, undo: ReplayUndo, order: CollectiveOrder, facts: GraphFacts
    ) -> None:
        self._replay: Replay | None = replay
        self._undo = undo
        self.order: CollectiveOrder | None = order
        self.facts = facts

    @property
    def effect(self) -> Effect:
        """What the last replay has done."""
        return self._undo.effect

    def replay(self) -> list[Tensor]:
        """Run the program.

        Below autograd and autocast: both have done their part when the operators were recorded.
        """
        if self.order is not None:
            self.order.begin()
        self._undo.begin()
        try:
            results = self._run()
        except BaseException:  # an operator's error, no memory, or somebody's signal handler
            self._undo.roll_back()
            raise
        self._undo.effect = Effect.ALL
        return results

    @property
    def can_be_taken_back(self) -> bool:
        """Whether ``take_back`` undoes every replay."""
        return self._undo.is_whole

    def take_back(self) -> None:
        """Undo the last replay, also one that is over; twice is once."""
        self._undo.roll_back()

    def keep(self) -> None:
        """Let the last replay stand."""
        self._undo.keep()

    def measure(self) -> tuple[float, ...]:
        """Replay with a clock at each operator, and undo it; see Graph.measure."""
        assert self.facts.program is not None
        return measure_replay(self._run, self.facts.program)

    def debug_dump(self, path: str) -> None:
        """Refuse: there is no driver whose drawing it would be.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(
            "debug_dump writes the CUDA driver's drawing of a graph, and this one runs on a CPU. "
            "Remedy: report().html(path) shows the recorded program"
        )

    def _run(self) -> list[Tensor]:
        if self._replay is None:
            raise CaptureError("the graph is closed")
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return list(self._replay())

    def close(self) -> None:
        """Drop the program and with it every tensor that it holds."""
        self._replay = self.order = None
        self._undo = ReplayUndo([], [])


class CpuGraphBackend:
    """Records under a dispatch mode and replays straight-line Python."""

    name = "cpu"

    def __init__(self, device: torch.device, *, poisons: bool = False) -> None:
        """Prepare.

        Args:
            device: A CPU.
            poisons: For tests: the program overwrites its dead memory with NaN patterns.
        """
        self.device = device
        self._poisons = poisons
        self.arena = Arena()

    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Return nothing to enter: a CPU has no streams."""
        return nullcontext()

    def begin_undo(self, state: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> CopyOnWrite:
        """Copy nothing yet; what is written is seen, known state or not."""
        return CopyOnWrite(scratch)

    def record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
        undo: UndoReplays = UndoReplays.NEVER,
    ) -> tuple[Graph, list[Tensor]]:
        """Record one iteration while it runs; see GraphBackend.record."""
        # A call of its own, so that the recording itself is freed before its pages are given back.
        recorded = self._record(
            iterate, model, check, collective=collective, scratch=scratch, undo=undo
        )
        give_back_freed_pages()
        return recorded

    def _record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
        undo: UndoReplays,
    ) -> tuple[Graph, list[Tensor]]:
        # A rank that stopped in the middle would leave the others waiting in a collective.
        recorder = Recorder(model, self.device, defers_refusals=collective)
        results, values = _run(recorder, iterate)
        # Cyclic garbage would look like tensors that somebody keeps.
        gc.collect()
        _await_release(recorder)
        give_back_freed_pages()  # of the iteration: what undoes it is still in memory
        refuse_dropped_tensors(recorder.storages)
        always = undo is UndoReplays.ALWAYS
        free = () if always else scratch
        builder = ProgramBuilder(recorder, values, free, self.arena, poisons=self._poisons)
        recorder.forget_tensors()  # before the program is compiled, which takes as much again
        # What this rank alone has undone, the others have not.
        if_cheap = undo is UndoReplays.AUTO and not collective
        undone, commit_node = plan_undo(builder, scratch, always=always, if_cheap=if_cheap)
        order = CollectiveOrder(builder.nodes, commit_node)

        def commit() -> None:
            order.commit()
            undone.commit()

        replay = builder.build(commit, commit_node, order.counted)
        program = builder.describe(recorder.sites.sites())
        check(recorder.has_touched)
        counts = Counter(str(node.op) for node in builder.nodes)
        facts = GraphFacts(
            num_nodes=len(builder.nodes),
            num_ops=recorder.num_ops,
            op_counts=dict(counts),
            num_escapes=len(builder.escapes),
            pool_bytes=self.arena.num_bytes,
            num_calls=builder.num_calls,
            undoes_all=undone.undoes_all,
            program=program,
        )
        return CpuGraph(replay, undone, order, facts), results


def _run(recorder: Recorder, iterate: Iterate) -> tuple[list[Tensor], list[Value]]:
    """Run the iteration; return copies of its results, and their Values."""
    with without_collector(), recorder.watching():
        outputs = iterate()
    values = [recorder.value_of(tensor, "output") for tensor in outputs]
    # Copies, so that the recorded results die here and do not look like escapes.
    return [tensor.clone() for tensor in outputs], values


def _await_release(recorder: Recorder) -> None:
    """Give the threads of the process group time to let go of what a collective has used.

    gloo's worker threads drop their references a little after ``wait`` has returned. Until then
    a buffer of the iteration looks like one that the model keeps.
    """
    deadline = time.monotonic() + _RELEASE_S
    for node in recorder.nodes:
        if node.op.namespace != "aten":
            made_here = [info for info in node.touched if not info.external]
            while any(info.alive for info in made_here) and time.monotonic() < deadline:
                time.sleep(_RELEASE_S / 100)
