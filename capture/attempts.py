"""Warm-ups and captures, of whole iterations or of forward passes alone; evaluation."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.guards.moves import Move, tell_of
from graphfsdp._capture.ranks.ranks import Ranks, WarmUpAgainError
from graphfsdp._capture.recording import Recording, Recordings, Results, kept_by, new_of
from graphfsdp._capture.undo.host_state import Attempt, save_random_states
from graphfsdp._capture.undo.interrupts import deliver_waiting
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.streams import in_turn, nvtx_range
from graphfsdp.config import OnChange
from graphfsdp.errors import CaptureError

_LOG = logging.getLogger("graphfsdp")
_MOST_NAMED = 8


class Attempts:
    """Runs iterations so that everything is undone if one fails, here or on another rank."""

    def __init__(
        self, engine: Engine, ranks: Ranks, recordings: Recordings, *, trains: bool
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._recordings = recordings
        self._trains = trains
        self.torn = ""  # why nobody knows weights and optimizer state any more

    def run(self, recording: Recording, *, captures: bool, notes: bool) -> list[Tensor]:
        """Warm up, or capture; return the results of the iteration, which has taken effect once."""
        with in_turn(deliver_waiting):
            return self._run_in_turn(recording, captures=captures, notes=notes)

    def _run_in_turn(self, recording: Recording, *, captures: bool, notes: bool) -> list[Tensor]:
        try:
            results = self._run(recording, captures=captures, notes=notes)
        except _WarmUpOnceMoreError:
            return self._run_in_turn(recording, captures=False, notes=True)
        if recording.graph is not None:
            recording.graph.compile()
        if recording.guards is not None:
            tell_of(recording.guards.stands_still())
        return results

    def _run(self, recording: Recording, *, captures: bool, notes: bool) -> list[Tensor]:
        engine = self._engine
        on_cpu = engine.backend.device.type == "cpu"
        # CUDA rule: a capture runs nothing. On a CPU it is an iteration that may be repeated.
        copies = engine.undoes or not self._trains or (captures and on_cpu)
        attempt = engine.attempt(copies=copies)
        grad_norm, results = engine.grad_norm, recording.results
        recording.results = Results()
        try:
            with self._as_written(), attempt.watching(), self._modes() as own_modes:
                if captures:
                    return self._capture(recording, attempt, own_modes)
                return self._warm_up(recording, notes=notes)
        except BaseException as first:  # whatever ends it, it must leave no trace
            refused = recording.refused_values(first)
            guards = recording.guards
            moves = guards.moved() if refused and guards is not None else []
            try:
                attempt.roll_back()
                if guards is not None:
                    guards.put_back()
            finally:
                engine.grad_norm, recording.results = grad_norm, results
                recording.drop_graph()
            if not copies and not captures:
                self.torn = (
                    f"a warm-up failed ({type(first).__name__}: {first}), and with undo='none' "
                    "nobody has kept what weights and optimizer state were before it"
                )
            error = self._ranks.repeat(first) if refused and not recording.has_waited else first
            waits = isinstance(error, WarmUpAgainError) and recording.wait_once()
            # Where there are others, the ones that were not refused keep theirs.
            begins_anew = refused and not self._ranks.is_collective
            if not waits and (begins_anew or not recording.num_eager):
                self._recordings.remove(recording)
            if not waits and error is first:
                if moves:
                    raise _naming(error, moves) from None
                raise
            if not waits:
                raise error from first
            _LOG.info("warming up once more: %s", error)
            raise _WarmUpOnceMoreError from None

    def _warm_up(self, recording: Recording, *, notes: bool) -> list[Tensor]:
        engine = self._engine
        watch = recording.noting(engine.constant_watch(trains=self._trains)) if notes else None
        # So that what libraries and optimizers keep of a warm-up never splits what the next needs.
        engine.backend.give_back_memory()
        with nvtx_range("warm-up"), engine.backend.on_capture_stream():
            results = self._iterate(recording, watch)
        self._ranks.settle()
        self._step_outside()
        recording.num_eager += 1
        return results

    def _capture(
        self,
        recording: Recording,
        attempt: Attempt,
        own_modes: Callable[[], None],
    ) -> list[Tensor]:
        engine = self._engine
        recording.guards = guards = engine.guards(recording.ran, trains=self._trains)

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read, engine.refuse)
            recording.check_memory()
            own_modes()  # those that every later call will find
            guards.arm(was_read, engine.refuse)
            self._ranks.settle()

        scratch = recording.inputs.tensors()
        if self._trains:
            engine.before_capture()
            scratch += engine.gradients.storages()
        before = kept_by(engine.model)

        def iterate() -> list[Tensor]:
            runs = engine.backend.device.type == "cpu"
            with nullcontext() if runs else self._ranks.recording():
                return self._iterate(recording, recording.comparing())

        with nvtx_range("capture"), guards.recording():
            recording.graph, results = engine.backend.record(
                iterate,
                engine.model,
                check,
                collective=self._ranks.is_collective,
                scratch=scratch,
            )
        recording.keep_log(engine.gradients.num_hooks())
        if self._trains:
            recording.landed = engine.gradients.landed()
            recording.kept = new_of(kept_by(engine.model), before)
        self._step_outside()
        return results

    def _iterate(
        self, recording: Recording, watch: AbstractContextManager[None] | None
    ) -> list[Tensor]:
        iterate = self._engine.iterate if self._trains else self._engine.evaluate
        return iterate(recording, watch)

    def _step_outside(self) -> None:
        """Step an optimizer that is not in the graph; a rank that captures does so at once."""
        if self._trains and not self._engine.full:
            self._engine.step_outside()
            self._ranks.settle()

    def _as_written(self) -> AbstractContextManager[object]:
        """Leave compiled functions uncompiled on a CPU: on a GPU their kernels are captured."""
        return as_written() if self._engine.backend.device.type == "cpu" else nullcontext()

    @contextmanager
    def _modes(self) -> Iterator[Callable[[], None]]:
        """Put the model into its mode; hand out what gives every module its own mode back."""
        if self._trains:
            yield lambda: None
            return
        with _evaluating(self._engine.model) as own_modes:
            yield own_modes


def _naming(error: BaseException, moves: Sequence[Move]) -> BaseException:
    """Return a refusal of other numbers that tells what the iteration has moved in Python."""
    if not isinstance(error, CaptureError):
        return error
    hazard = error.hazard
    remedy = f". Remedy: {hazard.fix}" if hazard.fix else ""
    return error.saying(
        f"{hazard.why}. What the iteration moves in Python: "
        f"{'; '.join(map(str, moves[:_MOST_NAMED]))}{remedy}"
    )


class _WarmUpOnceMoreError(Exception):
    """A capture was undone, and all ranks warm up in place of it."""


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[Callable[[], None]]:
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    model.eval()
    try:
        yield restore
    finally:
        restore()


class Evaluator:
    """Evaluates between training steps and leaves no trace in them.

    The model is in evaluation mode meanwhile; afterwards every module has its own mode again, and
    every generator the state that it had.
    """

    def __init__(self, engine: Engine, ranks: Ranks, max_graphs: int) -> None:
        self._engine = engine
        device = engine.backend.device
        self._recordings = Recordings(max_graphs, device, OnChange.RECAPTURE)
        self._attempts = Attempts(engine, ranks, self._recordings, trains=False)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int, *, eager: bool
    ) -> Any:
        restore = save_random_states(self._engine.model, self._engine.backend.device)
        try:
            with nvtx_range("evaluate"):
                recording = self._recordings.find(args, kwargs, num_microbatches)
                recording.inputs.load()
                results = self._results(recording, eager=eager)
        finally:
            restore()
        return recording.results.unflatten(results)[0]

    def close(self) -> None:
        self._recordings.close()

    def _results(self, recording: Recording, *, eager: bool) -> list[Tensor]:
        if recording.graph is not None and self._changes(recording):
            _LOG.info("evaluation: another graph, %s", self._changes(recording)[0])
            recording.close()
        if recording.graph is not None:
            return recording.graph.replay()
        captures = not eager and recording.num_eager > 0
        return self._attempts.run(recording, captures=captures, notes=True)

    def _changes(self, recording: Recording) -> list[Change]:
        """Return what has changed since the recording; modes do not count, they are set here."""
        assert recording.guards is not None
        changes = recording.guards.changes()
        return [change for change in changes if change.kind is not ChangeKind.MODE]
