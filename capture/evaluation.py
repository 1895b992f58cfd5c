"""Forward passes in evaluation mode, each kind of batch with a graph of its own."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.ranks.agreement import Agreement, WarmUpAgainError
from graphfsdp._capture.recording import Recording, Recordings
from graphfsdp._capture.undo.attempt import Attempt
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp._capture.undo.random_state import save_random_states
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.nvtx import nvtx_range

_LOG = logging.getLogger("graphfsdp")


class Evaluator:
    """Evaluates between training steps and leaves no trace in them.

    The model is in evaluation mode meanwhile; afterwards every module has its own mode again, and
    every generator the state that it had.
    """

    def __init__(self, engine: Engine, agreement: Agreement, max_graphs: int) -> None:
        """Prepare; nothing is recorded before the first call.

        Args:
            engine: The model.
            agreement: With the other ranks.
            max_graphs: Kinds of batches that have graphs at a time.
        """
        self._engine = engine
        self._agreement = agreement
        self._recordings = Recordings(max_graphs)

    @property
    def num_graphs(self) -> int:
        """Graphs at present."""
        return self._recordings.num_graphs

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int, *, eager: bool
    ) -> Any:
        """Evaluate one batch; see ``CapturedStep.evaluate``.

        Args:
            args: The batch.
            kwargs: The batch.
            num_microbatches: Parts that it is split into.
            eager: Make no graph.
        """
        engine = self._engine
        restore = save_random_states(engine.model, engine.backend.device)
        try:
            with nvtx_range("evaluate"):
                recording = self._recording_for(args, kwargs, num_microbatches)
                if recording.graph is not None and self._changes(recording):
                    _LOG.info("evaluation: another graph, %s", self._changes(recording)[0])
                    recording.close()
                if recording.graph is not None:
                    with DeferredInterrupts():
                        results = recording.graph.replay()
                else:
                    results = self._attempt(
                        recording, captures=not eager and recording.num_eager > 0
                    )
        finally:
            restore()
        return recording.results.unflatten(results)[0]

    def close(self) -> None:
        """Give the graphs back."""
        self._recordings.close()

    def _recording_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> Recording:
        found = self._recordings.load(args, kwargs, num_microbatches)
        if found is not None:
            return found
        device = self._engine.backend.device
        inputs = StaticInputs(args, kwargs, device=device, num_microbatches=num_microbatches)
        recording = Recording(inputs, num_microbatches)
        self._recordings.add(recording)
        return recording

    def _changes(self, recording: Recording) -> list[Change]:
        """Return what has changed since the recording; modes do not count, they are set here."""
        assert recording.guards is not None
        changes = recording.guards.changes()
        return [change for change in changes if change.kind is not ChangeKind.MODE]

    def _attempt(self, recording: Recording, *, captures: bool) -> list[Tensor]:
        attempt = self._engine.attempt()
        self._agreement.begin()
        try:
            with attempt.watching(), _evaluating(self._engine.model) as trained:
                if captures:
                    return self._capture(recording, attempt, trained)
                return self._warm_up(recording)
        except BaseException as error:  # whatever ends it, it must leave no trace
            with DeferredInterrupts():
                attempt.roll_back()
                recording.drop_graph()
                refused = recording.refused_values(error)
                waits = (refused or isinstance(error, WarmUpAgainError)) and recording.wait_once()
                if not waits:
                    self._recordings.remove(recording)
            if not waits:
                self._agreement.fail(error)
                raise
            if refused:  # no rank warms up once more unless all do
                self._agreement.settle(again=True)
            _LOG.info("evaluation: warming up once more: %s", error)
        return self._attempt(recording, captures=False)

    def _warm_up(self, recording: Recording) -> list[Tensor]:
        engine = self._engine
        watch = recording.noting(engine.constant_watch(trains=False))
        with engine.backend.on_capture_stream():
            results = engine.evaluate(recording, watch)
        self._agreement.settle()
        recording.num_eager += 1
        return results

    def _capture(
        self, recording: Recording, attempt: Attempt, trained: Callable[[], None]
    ) -> list[Tensor]:
        engine = self._engine
        recording.guards = guards = engine.guards(trains=False)

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read)
            recording.check_memory()
            trained()  # the modes that every later call will find
            guards.arm(was_read)
            if self._agreement.settle():
                raise WarmUpAgainError("another rank was given other numbers")

        with guards.recording():
            recording.graph, results = engine.backend.record(
                lambda: engine.evaluate(recording, recording.comparing()),
                engine.model,
                check,
                collective=self._agreement.is_collective,
                scratch=recording.inputs.tensors(),
            )
        recording.constants = None
        return results


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put a model into evaluation mode; hand out what gives every module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    model.eval()
    try:
        yield restore
    finally:
        restore()
