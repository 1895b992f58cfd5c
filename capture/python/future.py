"""The future, tried: an iteration that moves Python is run further on, and its programs compared.

Note [The future]: a replay runs no Python, so what an iteration moves there stands still from its
capture on. Whether that matters is tried: the iteration runs again from the same tensors, with
Python moved on as it would, ``NUM_REAL`` times; then with every number and length that moves
regularly set to what it will be after many more iterations, in powers of ten, and where a number
meets a constant of the code or another number in reach. Each run is undone. Operators, constants
and the tensors that are read from outside must be the same in all of them.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from graphfsdp._capture.python.clocks import ahead
from graphfsdp._capture.python.places import Move, Place, Snapshot
from graphfsdp._capture.python.series import further, steps_in
from graphfsdp._capture.rules.constants import Program
from graphfsdp._capture.trace.backend import Undo
from graphfsdp._capture.trace.source import is_users_file, user_line_of
from graphfsdp.base.hazards import HazardKind, SourceLine
from graphfsdp.errors import CaptureError

_LOG = logging.getLogger("graphfsdp")
NUM_REAL = 12
_FARTHEST = 10**7
_MOST_ENTRIES = 10**6  # that containers are made to hold
_MOST_KEYS = 10**4
_MOST_MEETINGS = 64  # of numbers with constants that are tried
_MOST_MULTIPLIED = 12
_MOST_NAMED, _MOST_TOLD = 4, 8
_CLOCKS_AHEAD_S = (0.0, 61.0, 3_700.0, 90_000.0, 4e7)
REMEDY = (
    "keep what counts in a buffer on the device and change it in place (add_, torch.where decides "
    "by it), pass it as an argument of the step, or do it outside of the iteration"
)


@dataclass
class Run:
    """One run of the iteration, undone but for Python.

    Attributes:
        program: What it did; None where nothing may watch it.
        error: What it raised.
    """

    program: Program | None
    error: Exception | None = None


def undone_run(
    iterate: Callable[[], object],
    undo: Undo,
    snapshot: Callable[[], Snapshot],
    noting: Callable[[], AbstractContextManager[Program | None]],
) -> Run:
    """Run an iteration and undo it, but for what it has moved in Python."""

    def run() -> Run:
        program, error = None, None
        try:
            with undo.watching(), noting() as program:
                iterate()
        except Exception as raised:
            error = raised
        python = snapshot()
        undo.roll_back()
        python.restore()
        return Run(program, error)

    before = snapshot()
    first = run()
    if first.error is None:
        return first
    before.restore()
    again = run()
    if again.error is None:  # no doing of Python's: out of memory, say
        raise first.error
    return again


class Future:
    """Tries an iteration further on.

    Args of the functions that it is given:
        snapshot: Returns a new snapshot of all Python in reach.
        run: Runs the iteration from the state of the tensors as it is now, and undoes that.
        agree: Tells all ranks a text, and returns what all have told; each rank calls it equally
            often.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        run: Callable[[], Run],
        agree: Callable[[str], Sequence[str]] = lambda text: [text],
    ) -> None:
        self._snapshot = snapshot
        self._run = run
        self._agree = agree
        self._series: dict[str, list[Any]] = {}

    def rehearse(self, moves: Sequence[Move]) -> list[str]:
        """Refuse what would train something else one day; return what stands still, in words.

        CaptureError names what moves and what it makes different. Afterwards Python is as it was.
        """
        start = self._snapshot()
        try:
            reads_clocks = any(move.kind == "clock" for move in moves)
            clocks = self._try_clocks(start) if any(self._agree("x" * reads_clocks)) else []
            for move in moves:
                self._refuse_draws(move, start)
            self._try(start)
        finally:
            start.restore()
        return [*(str(move) for move in moves if move.kind != "clock"), *clocks]

    def _refuse_draws(self, move: Move, start: Snapshot) -> None:
        if move.kind == "generator":
            raise CaptureError(
                f"the iteration draws from a generator of Python or NumPy ({move.name}); a replay "
                "runs no Python, so these numbers, or the branch that they decide, would stay for "
                "ever. Remedy: draw on the device (torch.rand), or draw outside and pass the "
                "number as a tensor of the batch",
                source=self._line_that_moves(move.name, start),
                kind=HazardKind.BAKED_NUMBER,
            )
        if move.kind == "advance":
            raise CaptureError(
                f"the iteration advances an iterator ({move.name}); a replay runs no Python, so "
                "it would go on with what the iterator gave while it was recorded, and nobody can "
                "tell what follows. Remedy: call next() outside of the iteration, and pass what it "
                "gives as an argument of the step",
                source=self._line_that_moves(move.name, start),
                kind=HazardKind.BAKED_NUMBER,
            )

    def _line_that_moves(self, name: str, start: Snapshot) -> SourceLine | None:
        """Run the iteration once more, looking after each line of the users' code."""
        place = start.places[name]
        finder = _LineFinder(lambda: not place.is_same(place.again()))
        with finder.tracing():
            self._run()
        start.restore()
        return finder.found

    def _try(self, start: Snapshot) -> None:
        history, first = [start], self._run()
        if first.error is not None:
            raise first.error
        history.append(self._snapshot())
        for index in range(1, NUM_REAL + 1):
            found = self._difference(first, self._run())
            mine = None if found is None else _error(found, index, start, history[-1])
            if self._is_told(mine):
                self._raise(mine)
            history.append(self._snapshot())
        self._series = {
            name: [snapshot.places[name].value for snapshot in history]
            for name, place in start.places.items()
            if all(name in snapshot.places for snapshot in history)
            and not all(place.is_same(snapshot.places[name]) for snapshot in history)
        }
        self._try_far(first, history)

    def _try_far(self, first: Run, history: Sequence[Snapshot]) -> None:
        base = history[-1]

        def differs(num_more: int) -> CaptureError | None:
            base.restore()
            is_whole = self._move_on(base, num_more)
            moved_on = self._snapshot()
            run = self._run()
            if run.error is not None and not is_whole:
                return None  # of a state that never comes about
            found = self._difference(first, run)
            num_runs = len(history) - 1 + num_more
            return None if found is None else _error(found, num_runs, history[0], moved_on)

        equal = 0
        for num_more in self._distances(base):
            mine = differs(num_more)
            if not self._is_told(mine):
                equal = num_more
                continue
            while num_more - equal > 1:
                middle = (num_more + equal) // 2
                earlier = differs(middle)
                if self._is_told(earlier):
                    num_more, mine = middle, earlier
                else:
                    equal = middle
            self._raise(mine)

    def _move_on(self, base: Snapshot, num_more: int) -> bool:
        """Set every place that moves regularly; tell whether nothing else moves."""
        lengths: list[tuple[Place, int]] = []
        is_whole = True
        for name, values in self._series.items():
            place = base.places[name]
            value = further(values, num_more)
            if value is None or place.holder is None or place.kind == "advance":
                is_whole = False
            elif place.kind == "length":
                is_keyed = isinstance(place.holder, (set, dict))
                most = _MOST_KEYS if is_keyed else _MOST_ENTRIES
                lengths.append((place, min(max(int(value), 0), most)))
                is_whole = False
            else:
                place.set(value)
        for place, length in lengths:
            place.set(length)
        return is_whole

    def _distances(self, base: Snapshot) -> list[int]:
        """Return how many iterations on is tried, in order; the same on every rank."""
        powers = [10**power for power in range(1, 8)]
        still = [
            place.value
            for name, place in base.places.items()
            if name not in self._series and type(place.value) in (int, float)
        ]
        few = sorted(base.numbers)[:_MOST_MULTIPLIED]
        products = sorted({one * other for one in few for other in few})
        meetings: dict[int, None] = {}
        steps = {each for values in self._series.values() for each in steps_in(values)}
        for constant in [*sorted(base.numbers), *still, *products]:
            for last, step in sorted(steps):
                # Where it is the constant, and where it has been moved as often.
                for distance in ((constant - last) / step, constant - last / step):
                    if 0 < distance <= _FARTHEST and len(meetings) <= _MOST_MEETINGS:
                        around = int(distance)
                        meetings |= dict.fromkeys((max(around - 1, 1), max(around, 1), around + 1))
        told = self._agree(json.dumps([*powers, *meetings]))
        return sorted({distance for text in told for distance in json.loads(text)})

    def _try_clocks(self, start: Snapshot) -> list[str]:
        """Compare the iteration with what it does later; return the clocks that it reads."""
        first: Run | None = None
        told: dict[tuple[str, SourceLine | None], None] = {}
        for seconds in _CLOCKS_AHEAD_S:
            with ahead(start.clocks, seconds) as read:
                run = self._run()
            start.restore()
            told |= dict.fromkeys(read)
            found = None if first is None else self._difference(first, run)
            if found is not None and read:
                name, source = read[0]
                found = found.located(None, source).saying(
                    f"the iteration reads the clock {name}, and does something else {seconds:g} "
                    f"seconds later: {found.hazard.why}. Remedy: {REMEDY}"
                )
            first = first or run
            if self._is_told(found):
                self._raise(found)
        return [f"{name} ({source}) was read" for name, source in told]

    def _difference(self, first: Run, run: Run) -> CaptureError | None:
        if run.error is not None and first.error is None:
            return CaptureError(
                f"it raises {type(run.error).__name__}: {run.error}",
                source=user_line_of(run.error),
                kind=HazardKind.CONTROL_FLOW,
            )
        if first.program is None or run.program is None:
            return None
        return first.program.difference(run.program)

    def _is_told(self, mine: CaptureError | None) -> bool:
        self._others = [text for text in self._agree("" if mine is None else str(mine)) if text]
        return bool(self._others)

    def _raise(self, mine: CaptureError | None) -> None:
        raise mine or CaptureError(f"another rank refuses the iteration: {self._others[0]}")


def tell_of(stands_still: Sequence[str]) -> None:
    """Warn, once, of what no replay will move."""
    if stands_still:
        _LOG.warning(
            "a replay runs no Python, so this stands still from now on: %s. Do it outside of the "
            "iteration if it is to go on",
            "; ".join(stands_still[:_MOST_TOLD]),
        )


def _error(found: CaptureError, num_runs: int, start: Snapshot, now: Snapshot) -> CaptureError:
    moves = sorted(start.moves_to(now), key=lambda move: move.kind != "value")
    named = "; ".join(map(str, moves[:_MOST_NAMED]))
    more = f" and {len(moves) - _MOST_NAMED} more" if len(moves) > _MOST_NAMED else ""
    return found.saying(
        f"the iteration moves Python, which no replay runs, and decides by it what is computed: "
        f"{named}{more}. After {num_runs} more iterations it is another one: "
        f"{found.hazard.why}. Remedy: {REMEDY}"
    )


class _LineFinder:
    """Finds the line of the users' code behind which something is no more what it was."""

    def __init__(self, is_moved: Callable[[], bool]) -> None:
        self._is_moved = is_moved
        self.found: SourceLine | None = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if self.found is not None or not is_users_file(code.co_filename):
            return None
        line = code.co_firstlineno

        def on_line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            nonlocal line
            if self.found is None and self._is_moved():  # the innermost frame comes first
                self.found = SourceLine(code.co_filename, line, code.co_qualname)
            line = frame.f_lineno
            return on_line

        return on_line
