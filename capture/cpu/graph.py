"""The CPU backend: the same capture semantics without a GPU."""

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from graphfsdp._capture.cpu.compiling import Recorded, compile_program
from graphfsdp._capture.cpu.memory import Arena, give_back_freed_pages
from graphfsdp._capture.cpu.program import ProgramBuilder, Replay, finished
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.trace.backend import Check, Effect, Graph, GraphFacts, Iterate
from graphfsdp._capture.trace.source import OpPhase, Site
from graphfsdp._capture.trace.values import (
    Node,
    Value,
    materialise,
    refuse_dropped_tensors,
    values_among,
)
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp.base.collector import YOUNG, without_collector
from graphfsdp.base.op_tensors import OpCall, storage_key
from graphfsdp.base.torch_internals import below_autograd, foreach_copy_, key_of, without_autocast
from graphfsdp.config import Compile
from graphfsdp.errors import CaptureError

# A worker thread needs microseconds; what lives longer than this is kept by somebody.
_RELEASE_S = 0.1
_MAX_KEPT_BYTES = 1 << 20
_MIN_KEPT = 8
_NODES_PER_KEPT = 8  # a copy costs less than a tenth of what eight operators do
# Namespaces whose operators draw from a generator only where their tags say so.
_QUIET = ("aten", "prims", "graphfsdp", "_c10d_functional")


@dataclass(frozen=True)
class CommitPoint:
    """Where a replay can no longer be undone.

    Note [Undo of a replay]: copies of everything that an iteration writes would cost a replay as
    much time and memory as the optimizer itself. But weights and optimizer state are written at
    the end, gradients belong to an iteration that did not happen, and what else is written before
    is small: running statistics and the state of generators. These are kept, and with them every
    failure before the optimizer step is undone. After a later one the way back is a checkpoint.

    Attributes:
        node: Index of the first node that writes what is not kept; None if no node does.
    """

    node: int | None
    kept: list[Value]
    generators: list[torch.Generator]


def find_commit_point(nodes: Sequence[Node], scratch: Sequence[Tensor]) -> CommitPoint:
    """Find the first write that cannot be put back; nobody needs old contents of ``scratch``."""
    max_kept = max(_MIN_KEPT, len(nodes) // _NODES_PER_KEPT)
    free = {key_of(tensor.untyped_storage()) for tensor in scratch}
    kept: dict[int, Value] = {}
    generators: dict[int, torch.Generator] = {}
    num_bytes = 0
    for index, node in enumerate(nodes):
        if not node.effects:
            continue
        found: dict[int, Value] = {}
        call = OpCall(node.op, node.args, node.kwargs)
        for value in values_among(call.written_arguments()):
            info = value.storage
            if info.external and id(value) not in kept and key_of(info.get()) not in free:
                found[id(value)] = value
        num_bytes += sum(map(_num_bytes, found.values()))
        if found and (num_bytes > _MAX_KEPT_BYTES or len(kept) + len(found) > max_kept):
            # None of what it writes is kept: a part of it could not undo it.
            return CommitPoint(index, list(kept.values()), list(generators.values()))
        kept.update(found)
        generators |= {id(each): each for each in _generators(node)}
    return CommitPoint(None, list(kept.values()), list(generators.values()))


class ReplayUndo:
    """What a replay writes before its commit point, as it was (see Note [Undo of a replay])."""

    effect: Effect

    def __init__(self, kept: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        self._kept = list(kept)
        self._copies = [torch.empty_like(tensor) for tensor in kept]
        self._generators = list(generators)
        self._states: list[Tensor] = []
        self.effect = Effect.NONE

    def begin(self) -> None:
        self.effect = Effect.NONE
        if self._kept:
            with torch.no_grad():
                foreach_copy_(self._copies, self._kept)
        self._states = list(map(torch.Generator.get_state, self._generators))

    def commit(self) -> None:
        """Note that from here on nothing can be put back; called before the first such write."""
        self.effect = Effect.PART

    def roll_back(self) -> None:
        if self.effect is not Effect.NONE:
            return
        if self._kept:
            foreach_copy_(self._kept, self._copies)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


class CpuGraph:
    """A program and its undo.

    Note [Compiled]: with ``recorded`` the program can be compiled, once the capture stands.
    """

    def __init__(
        self,
        replay: Replay,
        undo: ReplayUndo,
        facts: GraphFacts,
        recorded: Recorded | None = None,
    ) -> None:
        self._replay: Replay | None = replay
        self._undo = undo
        self._recorded = recorded
        self.facts = facts

    @property
    def effect(self) -> Effect:
        return self._undo.effect

    def replay(self) -> list[Tensor]:
        """Run the program below autograd and autocast, which did their part in the recording."""
        self._undo.begin()
        try:
            results = self._run(self._replay)
        except BaseException:  # an operator's error, no memory, or somebody's signal handler
            self._undo.roll_back()
            raise
        self._undo.effect = Effect.ALL
        return results

    def compile(self) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is None or self._replay is None:
            return
        self.facts = replace(self.facts, compiled=("as today: the compilation did not end",))
        made = compile_program(recorded)
        give_back_freed_pages()  # of the trial
        self._replay = made.replay or self._replay
        self.facts = replace(self.facts, compiled=made.lines, bound=made.bound)

    def _run(self, replay: Replay | None) -> list[Tensor]:
        if replay is None:
            raise CaptureError("the graph is closed")
        with below_autograd(), without_autocast():
            return list(replay())

    def close(self) -> None:
        if self._replay is not None and self.facts.describe is not None:
            self.facts.describe()  # while what its nodes name is there; afterwards they are let go
        self._replay = self._recorded = None
        self._undo = ReplayUndo([], [])


class CpuGraphBackend:
    """Records under a dispatch mode and replays straight-line Python."""

    name = "cpu"

    def __init__(
        self,
        device: torch.device,
        *,
        compile: Compile = Compile.OFF,  # noqa: A002 (as torch has it)
        lands_early: bool = False,
    ) -> None:
        """``lands_early``: what outlives an iteration may be half written where a replay fails."""
        self.device = device
        self._lands_early = lands_early
        self._compile = compile
        self.arena = Arena()

    def on_capture_stream(self) -> AbstractContextManager[list[Tensor]]:
        """Return nothing to enter: a CPU has no streams."""
        return nullcontext([])

    def give_back_memory(self, *, workspaces: bool = True) -> None:
        """Give back what replays compute in, too: iterations as written take as much beside it."""
        self.arena.give_back_pages()

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
        # A rank that stopped in the middle would leave the others waiting in a collective.
        recorder = Recorder(model, self.device, defers_refusals=collective)
        results, values = _run(recorder, iterate)
        # Cyclic garbage would look like tensors that somebody keeps. What a recording has made is
        # young, since nothing was collected meanwhile; older garbage may hold some of it.
        gc.collect(YOUNG)
        _await_release(recorder)
        if any(info.alive for info in recorder.storages if not info.external):
            gc.collect()
        give_back_freed_pages()  # of the iteration: what undoes it is still in memory
        refuse_dropped_tensors(recorder.storages)
        recording = finished(recorder, values)
        # The modes that see the iteration would slow down each call here, and see none of it.
        with torch._C._DisableTorchDispatch():
            builder = ProgramBuilder(recording, scratch, self.arena, lands_early=self._lands_early)
            recorder.forget_tensors()  # before the program is compiled, which takes as much again
            point = find_commit_point(builder.nodes, scratch)
            kept = [materialise(value, value.storage.get()) for value in point.kept]
            undone = ReplayUndo(kept, point.generators)
            replay = builder.build(undone.commit, point.node)
            describe = builder.description(recorder.sites.sites())
        check(recorder.has_touched)
        counts = Counter(str(node.op) for node in builder.nodes)
        facts = GraphFacts(
            num_nodes=len(builder.nodes),
            num_ops=recorder.num_ops,
            op_counts=dict(counts),
            num_escapes=len(recording.escapes),
            pool_bytes=self.arena.num_bytes,
            num_calls=builder.num_calls,
            describe=describe,
        )
        recorded = None
        if self._compile is not Compile.OFF:
            recorded = Recorded(
                recording,
                scratch,
                self.arena,
                undone.commit,
                point.node,
                _first_step(builder.nodes, recorder.sites.sites(), point.node),
                list({id(g): g for node in recording.nodes for g in _generators(node)}.values()),
                self._compile,
            )
        return CpuGraph(replay, undone, facts, recorded), results


def _run(recorder: Recorder, iterate: Iterate) -> tuple[list[Tensor], list[Value]]:
    with without_collector(YOUNG), recorder.watching():
        outputs = _apart(recorder, iterate())
    values = [recorder.value_of(tensor, "output") for tensor in outputs]
    # Copies, so that the recorded results die here and do not look like escapes.
    return [tensor.clone() for tensor in outputs], values


def _apart(recorder: Recorder, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy those in memory that was there before, or is another's: a replay's are the caller's."""
    found: list[Tensor] = []
    seen: set[int] = set()
    for tensor in outputs:
        info = recorder.storages.get(storage_key(tensor))
        is_own = info is not None and not info.external and id(info) not in seen
        seen.add(id(info))
        found.append(tensor if is_own else tensor.clone())
    return found


def _await_release(recorder: Recorder) -> None:
    """Give the threads of the process group time to let go of what a collective has used.

    gloo's worker threads drop their references a little after ``wait`` has returned. Until then
    a buffer of the iteration looks like one that the model keeps.
    """
    deadline = time.monotonic() + _RELEASE_S
    for node in recorder.nodes:
        if node.op.namespace != "aten":
            made_here = [v.storage for v in node.values if not v.storage.external]
            while any(info.alive for info in made_here) and time.monotonic() < deadline:
                time.sleep(_RELEASE_S / 100)


def _first_step(
    nodes: Sequence[Node], sites: Sequence[Site], commit_node: int | None
) -> int | None:
    """Return the first node of the optimizer behind the commit point, which statistics may set."""
    if commit_node is None:
        return None
    behind = (
        index
        for index in range(commit_node, len(nodes))
        if sites[nodes[index].site].phase is OpPhase.OPTIMIZER
    )
    return next(behind, None)


def _generators(node: Node) -> list[torch.Generator]:
    """Return the generators that a node may draw from."""
    call = OpCall(node.op, node.args, node.kwargs)
    if not call.is_random and node.op.namespace in _QUIET:
        return []
    items = (*node.args, *node.kwargs.values())
    given = [item for item in items if isinstance(item, torch.Generator)]
    return given or [torch.default_generator]


def _num_bytes(value: Value) -> int:
    _, shape, _, dtype, *_ = value.geometry
    return torch.Size(shape).numel() * dtype.itemsize
