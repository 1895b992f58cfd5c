"""Replays beside eager runs from the same state, compared bit for bit."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from graphfsdp._capture.comparison import Difference, copy_state, first_difference
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.ranks.agreement import Agreement
from graphfsdp._capture.recording import Recording
from graphfsdp._capture.trace.backend import Graph
from graphfsdp._capture.trace.op_digests import OpDigest, OpDigests, base_name, first_other
from graphfsdp._capture.trace.program_facts import NodeFacts, ProgramFacts
from graphfsdp.errors import VerificationError

_UNDO = "_foreach_copy"
_REMEDY = (
    "Remedy: make the iteration depend on tensors alone: what loss_fn takes from Python (a global, "
    "a closure, a counter) is baked into the graph. If it does, this is a bug of graphfsdp: please "
    "report it with this message. Everything is as it was before this call"
)


class Verifier:
    """Proves that a replay does what the same Python does eagerly.

    Note [Verification]: an eager iteration runs first and is undone, then the replay runs from
    the very same state. Everything that both leave is compared. If anything differs, both run
    once more with a digest of each operator's results, which names the first operator that
    computed something else; then everything is put back.
    """

    def __init__(self, engine: Engine, agreement: Agreement) -> None:
        """Prepare.

        Args:
            engine: Runs iterations.
            agreement: With the other ranks, which verify at the same time.
        """
        self._engine = engine
        self._agreement = agreement

    def replay(self, recording: Recording) -> list[Tensor]:
        """Replay the batch in the static inputs, after an eager run that is undone.

        Returns:
            The results of the replay, which has taken effect.

        Raises:
            VerificationError: something differs; everything is as it was before.
        """
        graph = recording.graph
        assert graph is not None
        attempt = self._engine.attempt()
        try:
            expected = self._run_eagerly(recording)
            with attempt.watching():
                results = graph.replay()
            difference = first_difference(expected, self._state(results))
            if difference is None:
                self._agreement.settle()
                return results
            attempt.roll_back()
            raise _error(difference, self._first_other_node(recording, graph))
        except BaseException:  # also Ctrl-C: nothing may stay half done
            attempt.roll_back()
            raise

    def run(self, recording: Recording, num_iterations: int) -> None:
        """Verify some iterations, one after the other, on the last batch; then undo them.

        Raises:
            VerificationError: something differs.
        """
        attempt = self._engine.attempt()
        try:
            with attempt.watching():
                for _ in range(num_iterations):
                    self._engine.before_replay(recording)
                    self.replay(recording)
                    self._engine.after_replay()
        finally:
            attempt.roll_back()

    def _state(self, results: list[Tensor]) -> dict[str, Tensor]:
        engine = self._engine
        return copy_state(
            engine.model, engine.optimizer, engine.gradients, results, engine.backend.device
        )

    def _run_eagerly(self, recording: Recording) -> dict[str, Tensor]:
        attempt = self._engine.attempt()
        try:
            with attempt.watching(), self._engine.backend.on_capture_stream():
                return self._state(self._engine.iterate(recording.again()))
        finally:
            attempt.roll_back()

    def _first_other_node(self, recording: Recording, graph: Graph) -> NodeFacts | None:
        """Return the first node of the program that computes something else than eager does."""
        program = graph.facts.program
        if program is None or self._engine.backend.name != "cpu":
            return None
        eager, replayed = OpDigests(), OpDigests()
        attempt = self._engine.attempt()
        try:
            with attempt.watching(), eager:
                self._engine.iterate(recording.again())
        finally:
            attempt.roll_back()
        attempt = self._engine.attempt()
        try:
            with attempt.watching(), replayed:
                graph.replay()
        finally:
            attempt.roll_back()
        return _match(eager.calls, replayed.calls, program)


def _match(
    eager: Sequence[OpDigest], replayed: Sequence[OpDigest], program: ProgramFacts
) -> NodeFacts | None:
    """Return the first node whose result no eager operator of its kind has computed."""
    nodes, calls = [], []
    waiting = iter(replayed)
    for node in program.nodes:
        if not node.called:
            continue
        # Before the program and before the first write of weights come the copies that a failed
        # replay would be undone from, after it the copies to what the model keeps.
        call = next((c for c in waiting if c.name != _UNDO or _UNDO in node.op), None)
        if call is not None:
            nodes.append(node)
            # A program may call another operator than was recorded (clamp_min for relu).
            calls.append(replace(call, name=base_name(node.op.partition(".")[2])))
    index = first_other(eager, calls)
    return None if index is None else nodes[index]


def _error(difference: Difference, node: NodeFacts | None) -> VerificationError:
    where = ""
    if node is not None:
        module = "" if node.site.module is None else f" in module {node.site.module or '(root)'!r}"
        source = "" if node.site.source is None else f", {node.site.source}"
        where = f" The first operator that computes something else is {node.op}{module}{source}."
    return VerificationError(
        f"a replay is not what the same iteration does eagerly: {difference}.{where} {_REMEDY}",
        tensor=difference.name,
        max_difference=difference.max_difference,
        op=None if node is None else node.op,
        module_path=None if node is None else node.site.module,
        source=None if node is None else node.site.source,
    )
