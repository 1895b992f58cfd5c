"""Runs one replay, and says in what state a failed one has left everything."""

from torch import Tensor

from graphfsdp._capture.agreement import Agreement
from graphfsdp._capture.backend import Effect
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.recording import Recording
from graphfsdp._capture.verification import Verifier
from graphfsdp.errors import VerificationError
from graphfsdp.nvtx import nvtx_range


class Replayer:
    """Replays the graphs of one captured step.

    Attributes:
        num_replays: Replays that are over.
        breakage: Why nothing can be replayed any more; empty while all is well.
    """

    def __init__(
        self, engine: Engine, agreement: Agreement, verifier: Verifier, num_to_verify: int
    ) -> None:
        """Prepare.

        Args:
            engine: Runs iterations.
            agreement: With the other ranks.
            verifier: Compares replays with eager runs.
            num_to_verify: Replays of each graph that are compared.
        """
        self._engine = engine
        self._agreement = agreement
        self._verifier = verifier
        self._num_to_verify = num_to_verify
        self.num_replays = 0
        self.breakage = ""

    def run(self, recording: Recording) -> list[Tensor]:
        """Replay the batch in the static inputs.

        Capture: never inside one.
        """
        graph = recording.graph
        assert graph is not None
        self._engine.before_replay(recording)
        try:
            with nvtx_range("replay"):
                if recording.num_verified < self._num_to_verify:
                    results = self._verifier.replay(recording)
                    recording.num_verified += 1
                else:
                    results = graph.replay()
        except VerificationError:
            raise
        except BaseException as error:  # of an operator, of a collective, or no memory
            self._after_failure(graph.effect, error)
            raise
        self._engine.after_replay()
        self.num_replays += 1
        return results

    def _after_failure(self, effect: Effect, error: BaseException) -> None:
        if effect is Effect.NONE:
            self._engine.gradients.drop()
        if effect is Effect.PART:
            self.breakage = f"{type(error).__name__}: {effect.value}"
        error.add_note(f"graphfsdp: {effect.value}")
        self._agreement.explain(error, self.num_replays)


__all__ = ["Replayer"]
