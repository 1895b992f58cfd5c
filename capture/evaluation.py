"""Forward passes in evaluation mode, each kind of batch with a graph of its own."""

import logging
from typing import Any

from torch import Tensor

from graphfsdp._capture.attempts import Attempts
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.ranks.ranks import Ranks
from graphfsdp._capture.recording import Recording, Recordings
from graphfsdp._capture.undo.host_state import save_random_states
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.config import OnChange

_LOG = logging.getLogger("graphfsdp")


class Evaluator:
    """Evaluates between training steps and leaves no trace in them.

    The model is in evaluation mode meanwhile; afterwards every module has its own mode again, and
    every generator the state that it had.
    """

    def __init__(self, engine: Engine, ranks: Ranks, max_graphs: int) -> None:
        self._engine = engine
        self._ranks = ranks
        device = engine.backend.device
        self._recordings = Recordings(max_graphs, device, OnChange.RECAPTURE)
        self._attempts = Attempts(engine, ranks, self._recordings, trains=False)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int, *, eager: bool
    ) -> Any:
        restore = save_random_states(self._engine.model, self._engine.backend.device)
        try:
            with nvtx_range("evaluate"):
                recording = self._recordings.load(args, kwargs, num_microbatches)
                with self._ranks.call("evaluation"):
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
            with DeferredInterrupts():
                return recording.graph.replay()
        captures = not eager and recording.num_eager > 0
        return self._attempts.run(recording, captures=captures, notes=True)

    def _changes(self, recording: Recording) -> list[Change]:
        """Return what has changed since the recording; modes do not count, they are set here."""
        assert recording.guards is not None
        changes = recording.guards.changes()
        return [change for change in changes if change.kind is not ChangeKind.MODE]
