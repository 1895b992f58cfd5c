"""Replaces stretches of a program by compiled ones, each of them tried beside what was recorded."""

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from graphfsdp._capture.compiled.bounds import beyond, chunks, largest
from graphfsdp._capture.compiled.inductor import Compiled, Compiler, RefusedError
from graphfsdp._capture.compiled.pieces import Piece, find_pieces, optimizer_kernels
from graphfsdp._capture.compiled.stretch_graph import in_one_line
from graphfsdp._capture.cpu.memory import Arena
from graphfsdp._capture.cpu.program import Commit, Program, ProgramBuilder, Replay
from graphfsdp._capture.trace.values import (
    Node,
    StorageInfo,
    as_bytes,
    contents_digest,
    places,
    span,
)
from graphfsdp._capture.undo.interrupts import deliver_waiting
from graphfsdp.base.op_tensors import is_empty
from graphfsdp.base.torch_internals import below_autograd, without_autocast
from graphfsdp.config import Compile

_LOG = logging.getLogger("graphfsdp")
_NUM_PAIRS = 7
_LARGEST_SHARE = 0.98  # of today's time; a smaller gain may be noise, and a loss then


@dataclass
class Compilation:
    """Compiles what can be of a program.

    Note [Trial]: today's program runs once from the present state. Then the same runs as pieces,
    each of them twice from the same memory: compiled, and as the recorded operators, with which
    the trial goes on. A piece whose numbers are beyond the bound, or that fails, runs as today, and
    all of them do if the recorded operators, cut up, do not end bit for bit where today's program
    does. Then everything is put back. All ranks make as many trials, whatever they can compile.
    The kernel of an optimizer at the end is never compiled and not tried: so weights and optimizer
    state need no copy, which would be most of what the trial takes.

    Attributes:
        commit_node: See ReplayUndo.
        step_node: From which on optimizers step and nothing is differentiated, behind the commit.
        generators: What the program may draw from.
        replay: With compiled pieces; None if there are none.
        lines: What was compiled and what was not, in words.
        bound: See bounds.py; 0 if there are no pieces.
    """

    program: Program
    scratch: Sequence[Tensor]
    arena: Arena
    commit: Commit
    commit_node: int | None
    step_node: int | None
    generators: Sequence[torch.Generator]
    how: Compile
    replay: Replay | None = None
    lines: tuple[str, ...] = ()
    bound: float = 0.0

    def __post_init__(self) -> None:
        nodes = self.program.nodes
        self._tried = nodes[: -optimizer_kernels(nodes) or None]
        self._functions: dict[int, Compiled] = {}  # by index of the piece
        self._failures: dict[int, str] = {}
        self._pieces: list[Piece] = []

    def run(self) -> None:
        started = time.perf_counter()
        self._compile_all()
        self.arena.give_back_pages()
        written = [*self._written(), *self.program.escaped]
        with _undone(written, self.generators) as restore:
            self._try(written, restore)
            compiled_s = time.perf_counter() - started
            slower = self._drop_slower(restore)
        if self._failures:
            _LOG.warning(
                "%d pieces run as recorded, not compiled: %s. Remedy: if this is the compiler's, "
                "mend it; else only speed is lost. step.report().compiled has all reasons",
                len(self._failures),
                next(iter(self._failures.values())),
            )
        if self._functions:
            self.bound = max(self._pieces[index].bound for index in self._functions)
            self.replay = self._build()
        self.lines = self._facts(compiled_s, slower)

    def _compile_all(self) -> None:
        program = self.program
        roots = [*program.outputs, *program.escapes]
        refused: dict[int, str] = {}
        made: dict[str, Compiled | str] = {}  # or why not; equal layers are one function
        with Compiler(deliver_waiting) as compiler:
            num_refused = -1
            while num_refused < len(refused):
                borders = {self.commit_node, self.step_node}
                self._pieces = find_pieces(program.nodes, borders, roots, refused)
                num_refused = len(refused)
                pieces = [piece for piece in self._pieces if not piece.reason]
                for number, piece in enumerate(pieces, 1):
                    if piece.graph.text in made:
                        continue
                    num_nodes = len(piece.nodes)
                    _LOG.info(
                        "compiling piece %d of %d: %d operators", number, len(pieces), num_nodes
                    )
                    try:
                        made[piece.graph.text] = compiler.compile(piece.graph)
                    except RefusedError as error:  # cut anew without these
                        nodes = piece.graph.nodes
                        refused |= {id(nodes[at]): why for at, why in error.why.items()}
                    except Exception as error:  # whatever it is, it runs as today
                        made[piece.graph.text] = in_one_line(error)
        for index, piece in enumerate(self._pieces):
            function = "" if piece.reason else made[piece.graph.text]
            if not isinstance(function, str):
                self._functions[index] = function
            elif not piece.reason:
                self._failures[index] = function

    def _written(self) -> list[Tensor]:
        """Return all external memory that the trial writes, as bytes."""
        ends: dict[int, tuple[StorageInfo, int, int]] = {}
        for node in self._tried:
            for value in node.written:
                info, (begin, end) = value.storage, places(value)
                if info.external:
                    _, first, last = ends.get(id(info), (info, begin, end))
                    ends[id(info)] = info, min(begin, first), max(end, last)
        # With the gaps: torch's fused kernels write there.
        return [as_bytes(info.get())[begin:end] for info, begin, end in ends.values()]

    def _try(self, written: Sequence[Tensor], restore: Callable[[], None]) -> None:
        as_today = self._builder(self._tried).build(_nothing, None)
        expected = list(map(contents_digest, [*_run(as_today), *written]))
        restore()
        self.arena.give_back_pages()  # pieces allocate what they make
        trials: dict[int, Compiled] = {}
        for index, function in self._functions.items():
            piece = self._pieces[index]
            trials[index] = _Trial(
                piece,
                function,
                differentiates=self.step_node is None or piece.start < self.step_node,
                fail=partial(self._failures.setdefault, index),
            )
        if list(map(contents_digest, [*_run(self._build(trials)), *written])) != expected:
            for index in self._functions:
                self._failures.setdefault(index, "its graph is not what was recorded")
        restore()
        for index in self._failures:
            self._functions.pop(index, None)

    def _drop_slower(self, restore: Callable[[], None]) -> int:
        """Drop the pieces that today's program runs faster; return how many these are."""
        if self.how is not Compile.AUTO:
            return 0
        before = len(self._functions)
        runs, places = self._race(restore)
        for index, place in places.items():
            if not _pays(*([run[place] for run in each] for each in runs)):
                del self._functions[index]
        # Also where none is left: collectives are in there, and another rank may have some.
        runs, _ = self._race(restore)
        # What a piece takes of the caches, others pay for.
        if not _pays(*([sum(run) for run in each] for each in runs)):
            self._functions.clear()
        return before - len(self._functions)

    def _race(self, restore: Callable[[], None]) -> tuple[list[list[list[int]]], dict[int, int]]:
        """Run today's program and the compiled one in turns.

        Returns how long each run of each took between the marks around pieces, in ns, and the
        place of each piece among these times.
        """
        times: list[int] = []

        def clock() -> None:
            times.append(time.perf_counter_ns())

        starts: dict[int, int] = {}
        marks: set[int] = set()
        for index in self._functions:
            piece = self._pieces[index]
            starts[index] = piece.start
            marks |= {piece.start, piece.stop}
        # The one that was built has no clock in it.
        builder = self._builder(self._tried)
        replays = [builder.build(_nothing, None, clock, marks), self._build(clock=clock)]
        runs: list[list[list[int]]] = [[], []]
        last = None
        for turn in range(2 * _NUM_PAIRS):
            which = (turn + turn // 2) % 2
            if which != last:
                # What both make would be more memory than training takes. The pages come back in
                # a run that does not count.
                self.arena.give_back_pages()
                _run(replays[which])
                restore()
                last = which
            times.clear()
            _run(replays[which])
            runs[which].append([b - a for a, b in pairwise(times)])
            restore()
        ordered = sorted(marks)
        return runs, {index: ordered.index(start) for index, start in starts.items()}

    def _build(
        self,
        functions: dict[int, Compiled] | None = None,
        clock: Callable[[], None] | None = None,
    ) -> Replay:
        """Build with the functions that there are, or with others in their place."""
        found = self._functions if functions is None else functions
        final = functions is None and clock is None
        nodes: list[Node] = []
        commit_node = None
        marks: set[int] = set()
        needed = self._needed_by_recorded(found)
        for index, piece in enumerate(self._pieces):
            if piece.start == self.commit_node:
                commit_node = len(nodes)
            if piece.start >= len(self._tried) and not final:
                break
            if index not in found:
                nodes += [*piece.ahead, *piece.nodes]
                continue
            marks.add(len(nodes))
            views = [view for view in piece.views if id(view.outputs[0]) in needed]
            nodes += [*piece.ahead, *piece.parts, piece.node(found[index]), *views]
            marks.add(len(nodes))
        commit = self.commit if final else _nothing
        return self._builder(nodes).build(commit, commit_node, clock, marks)

    def _needed_by_recorded(self, found: dict[int, Compiled]) -> set[int]:
        """Return the values that the caller and recorded operators take, by their ids."""
        values = [*self.program.outputs, *self.program.escapes]
        for index, piece in enumerate(self._pieces):
            recorded = piece.ahead if index in found else (*piece.ahead, *piece.nodes)
            values += [value for node in recorded for value in node.inputs]
        return {id(value) for value in values}

    def _builder(self, nodes: Sequence[Node]) -> ProgramBuilder:
        program = replace(self.program, nodes=nodes)
        return ProgramBuilder(program, self.scratch, self.arena)

    def _facts(self, compiled_s: float, num_slower: int) -> tuple[str, ...]:
        num_nodes = sum(len(piece.nodes) for piece in self._pieces)
        num_compiled = sum(len(self._pieces[index].nodes) for index in self._functions)
        lines = [
            f"{num_compiled} of {num_nodes} nodes in {len(self._functions)} pieces, made in "
            f"{compiled_s:.1f} s"
        ]
        if num_slower:
            lines.append(f"as today: {num_slower} pieces, which are no faster compiled")
        reasons = Counter(f"as today: {why}" for why in self._failures.values())
        for piece in self._pieces:
            reasons.update(f"as today: {node.op} {_why_ahead(node)}" for node in piece.ahead)
            if piece.reason:
                reasons[f"as today: {piece.nodes[0].op} {piece.reason}"] += 1
        lines += [f"{why} ({count} times)" if count > 1 else why for why, count in reasons.items()]
        return tuple(lines)


class _Trial:
    """Runs a piece compiled and as recorded, from the same memory; goes on with the latter.

    What is compiled gets copies of what outlives the iteration, so that weights are safe from it.
    """

    def __init__(
        self,
        piece: Piece,
        function: Compiled,
        *,
        differentiates: bool,
        fail: Callable[[str], object],
    ) -> None:
        self._function = function
        self._as_recorded = piece.graph.run
        self._fail = fail
        self._differentiates = differentiates
        written = {id(value.storage) for node in piece.nodes for value in node.written}
        inputs = [*enumerate(piece.graph.inputs)]
        self._written = [index for index, value in inputs if id(value.storage) in written]
        self._outlive = [index for index, value in inputs if value.storage.external]
        self._bound = piece.bound
        self._forms = [value.geometry for value in piece.results]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        copies = {index: _copy(inputs[index]) for index in {*self._written, *self._outlive}}
        try:
            got = self._function([copies.get(at, tensor) for at, tensor in enumerate(inputs)])
        except Exception as error:
            self._fail(in_one_line(error))
            return self._as_recorded(inputs)
        expected = self._as_recorded(inputs)
        written = [copies.pop(index) for index in self._written]
        if not all(_same_bits(inputs[index], copy) for index, copy in copies.items()):
            self._fail("it writes what was only read")
        self._compare([*expected, *(inputs[index] for index in self._written)], [*got, *written])
        return expected

    def _compare(self, expected: list[Tensor], got: list[Tensor]) -> None:
        if len(expected) != len(got):
            self._fail("it returns other tensors")
            return
        for form, tensor in zip(self._forms, got, strict=False):
            if (tuple(tensor.shape), tuple(tensor.stride())) != form[1:3]:
                self._fail("a result has other strides")
                return
        scales = [largest(tensor) if tensor.dtype.is_floating_point else 0.0 for tensor in expected]
        joint = max(scales, default=0.0)
        for scale, one, other in zip(scales, expected, got, strict=True):
            # What steps computes each element by itself; what differentiates has sums that vanish.
            size = joint if self._differentiates else scale
            parts = zip(chunks(one), chunks(other), strict=True)
            if any(beyond(*part, self._bound * size).any() for part in parts):
                gap = float((one.double() - other.double()).abs().max())
                self._fail(f"it computes something else, by {gap:.2g} where {size:.2g} is largest")
                return


def _pays(today: Sequence[int], compiled: Sequence[int]) -> bool:
    return statistics.median(compiled) <= _LARGEST_SHARE * statistics.median(today)


@contextmanager
def _undone(
    written: Sequence[Tensor], generators: Sequence[torch.Generator]
) -> Iterator[Callable[[], None]]:
    saved = [tensor.clone() for tensor in written]
    states = [generator.get_state() for generator in generators]

    def restore() -> None:
        with torch.no_grad():
            for tensor, old in zip(written, saved, strict=True):
                tensor.copy_(old)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    try:
        yield restore
    finally:
        restore()


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of the same strides, with whatever lies between the elements."""
    numel = span(tensor.shape, tensor.stride())
    return tensor.as_strided((numel,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    both = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*both)


def _run(replay: Replay) -> list[Tensor]:
    with below_autograd(), without_autocast():
        return list(replay())


def _why_ahead(node: Node) -> str:
    return "makes memory ahead" if is_empty(node.op) else "draws random numbers"


def _nothing() -> None:
    return None
