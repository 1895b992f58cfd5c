"""The CPU backend: the same capture semantics without a GPU."""

import ctypes
import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor, nn

from graphfsdp._capture.cpu.measure import measure_replay
from graphfsdp._capture.cpu.memory import Arena
from graphfsdp._capture.cpu.program import ProgramBuilder, Replay
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.trace.backend import Check, Effect, Graph, GraphFacts, Iterate
from graphfsdp._capture.trace.values import Value, materialise, refuse_dropped_tensors
from graphfsdp._capture.undo.commit_point import ReplayUndo, find_commit_point
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp.base.collector import without_collector
from graphfsdp.errors import CaptureError, PhaseError

# A worker thread needs microseconds; what lives longer than this is kept by somebody.
_RELEASE_S = 0.1


class CpuGraph:
    def __init__(self, replay: Replay, undo: ReplayUndo, facts: GraphFacts) -> None:
        self._replay: Replay | None = replay
        self._undo = undo
        self.facts = facts

    @property
    def effect(self) -> Effect:
        return self._undo.effect

    def replay(self) -> list[Tensor]:
        """Run the program below autograd and autocast, which did their part in the recording."""
        self._undo.begin()
        try:
            results = self._run()
        except BaseException:  # an operator's error, no memory, or somebody's signal handler
            self._undo.roll_back()
            raise
        self._undo.effect = Effect.ALL
        return results

    def measure(self) -> tuple[float, ...]:
        assert self.facts.program is not None
        return measure_replay(self._run, self.facts.program)

    def debug_dump(self, path: str) -> None:
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
        self._replay = None
        self._undo = ReplayUndo([], [])


class CpuGraphBackend:
    """Records under a dispatch mode and replays straight-line Python."""

    name = "cpu"

    def __init__(self, device: torch.device, *, poisons: bool = False) -> None:
        """``poisons``, for tests: the program overwrites its dead memory with NaN patterns."""
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
    ) -> tuple[Graph, list[Tensor]]:
        # A call of its own, so that the recording itself is freed before its pages are given back.
        recorded = self._record(iterate, model, check, collective=collective, scratch=scratch)
        _give_back_freed_pages()
        return recorded

    def _record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
    ) -> tuple[Graph, list[Tensor]]:
        # A rank that stopped in the middle would leave the others waiting in a collective.
        recorder = Recorder(model, self.device, defers_refusals=collective)
        results, values = _run(recorder, iterate)
        # Cyclic garbage would look like tensors that somebody keeps.
        gc.collect()
        _await_release(recorder)
        _give_back_freed_pages()  # of the iteration: what undoes it is still in memory
        refuse_dropped_tensors(recorder.storages)
        builder = ProgramBuilder(recorder, values, scratch, self.arena, poisons=self._poisons)
        recorder.forget_tensors()  # before the program is compiled, which takes as much again
        point = find_commit_point(builder.nodes, scratch)
        kept = [materialise(value, value.storage.get()) for value in point.kept]
        undone = ReplayUndo(kept, point.generators)
        replay = builder.build(undone.commit, point.node)
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
            program=program,
        )
        return CpuGraph(replay, undone, facts), results


def _run(recorder: Recorder, iterate: Iterate) -> tuple[list[Tensor], list[Value]]:
    with without_collector(), recorder.watching():
        outputs = iterate()
    values = [recorder.value_of(tensor, "output") for tensor in outputs]
    # Copies, so that the recorded results die here and do not look like escapes.
    return [tensor.clone() for tensor in outputs], values


def _give_back_freed_pages() -> None:
    """Let the system have the heap's pages that nobody uses, where it keeps them otherwise."""
    # glibc only; elsewhere the peak is a little higher.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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
