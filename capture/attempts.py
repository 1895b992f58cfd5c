"""Warm-ups and captures, of whole iterations or of forward passes alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.guards.moves import Move, tell_of
from graphfsdp._capture.ranks.ranks import Ranks, WarmUpAgainError
from graphfsdp._capture.recording import Recording, Recordings, kept_by, new_of
from graphfsdp._capture.trace.ran import Ran
from graphfsdp._capture.undo.host_state import Attempt
from graphfsdp._capture.undo.interrupts import deliver_waiting
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.streams import in_turn, nvtx_range
from graphfsdp.errors import CaptureError

_LOG = logging.getLogger("graphfsdp")
_MOST_NAMED = 8


class Attempts:
    """Runs iterations so that everything is undone if one fails, here or on another rank."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks
        self.torn = ""  # why nobody knows weights and optimizer state any more

    def run(
        self, recording: Recording, recordings: Recordings, *, captures: bool, notes: bool
    ) -> list[Tensor]:
        """Warm up, or capture; return the results of the iteration, which has taken effect once.

        One of ``recordings`` that is of no use any more is taken out of them.
        """
        with in_turn(deliver_waiting):
            results = self._run(recording, recordings, captures=captures, notes=notes)
            if results is None:
                results = self._run(recording, recordings, captures=False, notes=True)
            assert results is not None  # it waits once
            if recording.graph is not None:
                recording.graph.compile()
            if recording.guards is not None:
                tell_of(recording.guards.stands_still())
            return results

    def _run(
        self, recording: Recording, recordings: Recordings, *, captures: bool, notes: bool
    ) -> list[Tensor] | None:
        """Return None if a capture was undone, and all ranks are to warm up in place of it."""
        engine, trains = self._engine, recording.trains
        on_cpu = engine.backend.device.type == "cpu"
        # CUDA rule: a capture runs nothing. On a CPU it is an iteration that may be repeated.
        copies = engine.undoes or not trains or (captures and on_cpu)
        attempt = engine.attempt(copies=copies)
        grad_norm = engine.grad_norm
        # On a GPU the kernels of compiled functions are captured.
        uncompiled = as_written() if on_cpu else nullcontext()
        try:
            with uncompiled, attempt.watching(), _mode_of(engine.model, trains) as own_modes:
                if captures:
                    return self._capture(recording, attempt, own_modes)
                return self._warm_up(recording, notes=notes)
        except BaseException as first:  # whatever ends it, it must leave no trace
            constants, guards = recording.constants, recording.guards
            refused = constants is not None and constants.failure is first  # other numbers
            moves = guards.moved() if refused and guards is not None else []
            try:
                attempt.roll_back()
                if guards is not None:
                    guards.put_back()
            finally:
                engine.grad_norm = grad_norm
                recording.drop_graph()
            if not copies and not captures:
                self.torn = (
                    f"a warm-up failed ({type(first).__name__}: {first}), and with undo='none' "
                    "nobody has kept what weights and optimizer state were before it"
                )
            error = self._ranks.repeat(first) if refused and not recording.has_waited else first
            if isinstance(error, WarmUpAgainError) and recording.wait_once():
                _LOG.info("warming up once more: %s", error)
                return None
            # Where there are others, the ones that were not refused keep theirs.
            begins_anew = refused and not self._ranks.is_collective
            if begins_anew or not recording.num_eager:
                recordings.remove(recording)
            if error is not first:
                raise error from first
            if moves:
                raise _naming(error, moves) from None
            raise

    def _warm_up(self, recording: Recording, *, notes: bool) -> list[Tensor]:
        engine, trains = self._engine, recording.trains
        constants = engine.constant_watch(trains=trains) if notes else None
        # So that what libraries and optimizers keep of a warm-up never splits what the next needs.
        engine.backend.give_back_memory()
        with nvtx_range("warm-up"), engine.backend.on_capture_stream():
            watch = nullcontext() if constants is None else recording.noting(constants)
            results, recording.results = engine.iterate(recording.inputs, watch, trains=trains)
        self._ranks.settle()
        self._step_outside(recording)
        recording.num_eager += 1
        return results

    def _capture(
        self, recording: Recording, attempt: Attempt, own_modes: Callable[[], None]
    ) -> list[Tensor]:
        engine, ranks, trains = self._engine, self._ranks, recording.trains
        constants = recording.constants
        ran = Ran() if constants is None else constants.ran
        recording.guards = guards = engine.guards(ran, trains=trains)

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read, engine.refuse)
            if constants is not None:
                constants.check_memory()
            own_modes()  # those that every later call will find
            guards.arm(was_read, engine.refuse)
            ranks.settle()

        scratch = recording.inputs.tensors()
        if trains:
            engine.before_capture()
            scratch += engine.gradients.storages()
        before = kept_by(engine.model)
        runs = engine.backend.device.type == "cpu"

        def iterate() -> list[Tensor]:
            watch = nullcontext() if constants is None else constants.comparing()
            with nullcontext() if runs else ranks.recording():
                tensors, recording.results = engine.iterate(recording.inputs, watch, trains=trains)
            return tensors

        with nvtx_range("capture"), guards.recording():
            recording.graph, results = engine.backend.record(
                iterate, engine.model, check, collective=ranks.is_collective, scratch=scratch
            )
        recording.begin(engine.gradients.num_hooks())
        if trains:
            recording.landed = engine.gradients.landed()
            recording.kept = new_of(kept_by(engine.model), before)
        self._step_outside(recording)
        return results

    def _step_outside(self, recording: Recording) -> None:
        """Step an optimizer that is not in the graph; a rank that captures does so at once."""
        if recording.trains and not self._engine.full:
            self._engine.step_outside()
            self._ranks.settle()


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


@contextmanager
def _mode_of(model: nn.Module, trains: bool) -> Iterator[Callable[[], None]]:
    """Put a model that is evaluated into its mode; hand out what gives every module its own."""
    modes = [] if trains else [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    if not trains:
        model.eval()
    try:
        yield restore
    finally:
        restore()
