"""The CPU backend: the same capture semantics without a GPU."""

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.cpu.compiling import Compilation
from graphfsdp._capture.cpu.memory import Arena, give_back_freed_pages
from graphfsdp._capture.cpu.program import ProgramBuilder, Replay, finished
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.trace.backend import Check, Effect, Graph, GraphFacts, Iterate
from graphfsdp._capture.trace.source import OpPhase, Site
from graphfsdp._capture.trace.values import (
    Node,
    StorageTable,
    Value,
    as_bytes,
    materialise,
    refuse_dropped_tensors,
    span,
    storage_of,
)
from graphfsdp.base.op_tensors import OpCall, OperatorMode, storage_key
from graphfsdp.base.streams import YOUNG, without_collector
from graphfsdp.base.torch_internals import (
    below_autograd,
    foreach_copy_,
    key_of,
    storage_behind,
    without_autocast,
)
from graphfsdp.config import Compile
from graphfsdp.errors import CaptureError

# A worker thread needs microseconds; what lives longer than this is kept by somebody.
_RELEASE_S = 0.1
_MAX_KEPT_BYTES = 1 << 20
_MIN_KEPT = 8
_NODES_PER_KEPT = 8  # a copy costs less than a tenth of what eight operators do


class CopyOnWrite(OperatorMode):
    """Old contents of everything that an iteration has written outside itself.

    A warm-up and a recording on a CPU run for real, so a failed one must be taken back; a copy is
    made only of what is written, just before, and not of ``scratch``, which nobody has seen. So
    this sees every operator before it runs; the modes of a recording lie inside of it. Storages are
    held weakly: whoever holds the memory of an iteration changes what autograd does with it.
    """

    joins = True

    def __init__(self, scratch: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._free = set(map(storage_key, scratch))  # storages that need no copy
        self._made = StorageTable()  # by the iteration
        self._saved: list[tuple[StorageWeakRef, int, Tensor]] = []  # storage, first byte, contents
        # By identity of the storage: first byte, byte after the last.
        self._ranges: dict[int, set[tuple[int, int]]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def watching(self) -> AbstractContextManager[object]:
        """Copy what operators in the body are about to write, if it existed before."""
        return self

    def on_op(self, call: OpCall) -> Any:
        for tensor in call.may_write():
            if not self._made.has(tensor) and storage_key(tensor) not in self._free:
                with suppress(CaptureError):  # a sparse tensor: a recording will refuse it
                    self._save(tensor)
        for generator in _drawn_from(call):
            if id(generator) not in self._generators:
                self._generators[id(generator)] = (generator, generator.get_state())
        result = call.run()
        for tensor, _ in call.made(result):
            self._made.known(tensor, call.name, external=False, varies=False)
        return result

    def _save(self, tensor: Tensor) -> None:
        storage = storage_of(tensor, "save")
        start, end = _byte_range(tensor)
        ranges = self._ranges.setdefault(key_of(storage), set())
        if any(first <= start and end <= last for first, last in ranges):
            return
        reference = StorageWeakRef(storage)  # keeps the identity from being used again
        self._saved.append((reference, start, as_bytes(storage)[start:end].clone()))
        ranges.add((start, end))  # only when all of it is safe

    def roll_back(self) -> None:
        # Newest first: where ranges overlap, the copy that was made first is the oldest contents.
        for reference, first, old in reversed(self._saved):
            storage = storage_behind(reference)
            if storage is not None:
                as_bytes(storage)[first : first + old.numel()].copy_(old)
        for generator, state in self._generators.values():
            generator.set_state(state)


class ReplayUndo:
    """What a replay writes before its commit point, as it was.

    Note [Undo of a replay]: copies of everything that an iteration writes would cost a replay as
    much time and memory as the optimizer itself. But weights and optimizer state are written at
    the end, gradients belong to an iteration that did not happen, and what else is written before
    is small: running statistics and the state of generators. These are kept, and with them every
    failure before the optimizer step is undone. After a later one the way back is a checkpoint.

    Attributes:
        node: Index of the first node that writes what is not kept; None if no node does.
        kept: What is written before.
    """

    def __init__(self, nodes: Sequence[Node], scratch: Sequence[Tensor]) -> None:
        """Find the first write that cannot be put back; nobody needs ``scratch`` as it was."""
        self.node: int | None = None
        self.effect = Effect.NONE
        max_kept = max(_MIN_KEPT, len(nodes) // _NODES_PER_KEPT)
        free = {key_of(tensor.untyped_storage()) for tensor in scratch}
        kept: dict[int, Value] = {}
        generators: dict[int, torch.Generator] = {}
        num_bytes = 0
        for index, node in enumerate(nodes):
            if not node.effects:
                continue
            found = {
                id(value): value
                for value in node.written
                if value.storage.external
                and id(value) not in kept
                and key_of(value.storage.get()) not in free
            }
            num_bytes += sum(value.numel * value.geometry[3].itemsize for value in found.values())
            if found and (num_bytes > _MAX_KEPT_BYTES or len(kept) + len(found) > max_kept):
                # None of what it writes is kept: a part of it could not undo it.
                self.node = index
                break
            kept.update(found)
            generators |= {id(each): each for each in _drawn_from(node.call)}
        self.kept = [materialise(value, value.storage.get()) for value in kept.values()]
        self._copies = [torch.empty_like(tensor) for tensor in self.kept]
        self._generators = list(generators.values())
        self._states: list[Tensor] = []

    def begin(self) -> None:
        self.effect = Effect.NONE
        if self.kept:
            with torch.no_grad():
                foreach_copy_(self._copies, self.kept)
        self._states = list(map(torch.Generator.get_state, self._generators))

    def commit(self) -> None:
        """Note that from here on nothing can be put back; called before the first such write."""
        self.effect = Effect.PART

    def roll_back(self) -> None:
        if self.effect is not Effect.NONE:
            return
        if self.kept:
            foreach_copy_(self.kept, self._copies)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


class CpuGraph:
    """A program and its undo.

    Note [Compiled]: with a ``compilation`` it can be compiled, once the capture stands.
    """

    def __init__(
        self,
        replay: Replay,
        undo: ReplayUndo,
        facts: GraphFacts,
        compilation: Compilation | None = None,
    ) -> None:
        self._replay: Replay | None = replay
        self._undo = undo
        self._compilation = compilation
        self.facts = facts

    @property
    def effect(self) -> Effect:
        return self._undo.effect

    def replay(self) -> list[Tensor]:
        """Run the program below autograd and autocast, which did their part in the recording."""
        assert self._replay is not None  # it is open
        self._undo.begin()
        try:
            with below_autograd(), without_autocast():
                results = list(self._replay())
        except BaseException:  # an operator's error, no memory, or somebody's signal handler
            self._undo.roll_back()
            raise
        self._undo.effect = Effect.ALL
        return results

    def compile(self) -> None:
        compilation, self._compilation = self._compilation, None
        if compilation is None or self._replay is None:
            return
        self.facts = replace(self.facts, compiled=("as today: the compilation did not end",))
        compilation.run()
        give_back_freed_pages()  # of the trial
        self._replay = compilation.replay or self._replay
        self.facts = replace(self.facts, compiled=compilation.lines, bound=compilation.bound)

    def close(self) -> None:
        if self._replay is not None and self.facts.describe is not None:
            self.facts.describe()  # while what its nodes name is there; afterwards they are let go
        self._replay = self._compilation = None
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
            undone = ReplayUndo(builder.nodes, scratch)
            replay = builder.build(undone.commit, undone.node)
            describe = builder.description(recorder.sites.sites())
        check(recorder.has_touched)
        counts = Counter(str(node.op) for node in builder.nodes)
        facts = GraphFacts(
            num_nodes=len(builder.nodes),
            num_ops=recorder.num_ops,
            op_counts=dict(counts),
            num_escapes=len(recording.escapes),
            pool_bytes=self.arena.num_bytes,
            describe=describe,
        )
        compilation = None
        if self._compile is not Compile.OFF:
            compilation = Compilation(
                recording,
                scratch,
                self.arena,
                undone.commit,
                undone.node,
                _first_step(builder.nodes, recorder.sites.sites(), undone.node),
                list(dict.fromkeys(g for node in recording.nodes for g in _drawn_from(node.call))),
                self._compile,
            )
        return CpuGraph(replay, undone, facts, compilation), results


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
    """Return the first node of the optimizer behind the commit point, which statistics may set.

    Without such a point, where all that is written can be put back, the first of all.
    """
    behind = (
        index
        for index in range(commit_node or 0, len(nodes))
        if sites[nodes[index].site].phase is OpPhase.OPTIMIZER
    )
    return next(behind, None)


def _drawn_from(call: OpCall) -> list[torch.Generator]:
    """Return the generators that a call may draw from."""
    if call.is_trusted and not call.is_random:
        return []
    items = (*call.args, *call.kwargs.values())
    given = [item for item in items if isinstance(item, torch.Generator)]
    return given or [torch.default_generator]


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor looks at, and the one behind its last."""
    if tensor.numel() == 0:
        return (0, 0)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return (start, start + span(tensor.shape, tensor.stride()) * tensor.element_size())
