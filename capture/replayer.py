"""Runs one replay; a failed one is undone on all ranks as far as it can be."""

import logging
from contextlib import nullcontext
from typing import NoReturn

from torch import Tensor

from graphfsdp._capture.agreement import Agreement
from graphfsdp._capture.backend import Effect, Graph
from graphfsdp._capture.collective_order import CollectiveOrder
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.rank_watch import Failure, RankWatch, Stage
from graphfsdp._capture.recording import Recording
from graphfsdp._capture.verification import Verifier
from graphfsdp.config import CaptureOptions
from graphfsdp.errors import CaptureError, RankFailedError, VerificationError, broken
from graphfsdp.nvtx import nvtx_range

_ALONE = (
    "the other ranks have updated their weights in this replay, and this one has not. Remedy: "
    "load model and optimizer from a checkpoint, close this step, and capture again"
)
_LOG = logging.getLogger("graphfsdp")


class Replayer:
    """Replays the graphs of one captured step.

    Attributes:
        breakage: Why nothing can be replayed any more; empty while all is well.
    """

    def __init__(
        self,
        engine: Engine,
        agreement: Agreement,
        watch: RankWatch,
        verifier: Verifier,
        options: CaptureOptions,
    ) -> None:
        """Prepare.

        Args:
            engine: Runs iterations.
            agreement: With the other ranks.
            watch: Hears of their failures.
            verifier: Compares replays with eager runs.
            options: What the user has chosen.
        """
        self._engine = engine
        self._agreement = agreement
        self._watch = watch
        self._verifier = verifier
        self._options = options
        self.breakage = ""

    def prepare(self, graph: Graph) -> None:
        """Get ready to replay a new graph; every rank does it at the same time.

        Raises:
            CaptureError: another rank failed.
        """
        if not self._agreement.is_collective:
            return
        order = graph.order
        least = self._agreement.least(0 if order is None else order.num_before_commit)
        if order is not None and least:
            order.arm(self._watch.gate, least)
        self._watch.start()

    def run(self, recording: Recording) -> list[Tensor]:
        """Replay the batch in the static inputs.

        Raises:
            GraphFSDPError: another rank has failed in this call; of the class that it has raised
                there, where that is an error about the batch or about something that changed.

        Capture: never inside one.
        """
        graph = recording.graph
        assert graph is not None
        if self._options.undo_replays:
            return self._run_undoably(recording, graph)
        return self._run(recording, graph)

    def _run(self, recording: Recording, graph: Graph) -> list[Tensor]:
        if recording.num_verified < self._options.verify:
            results = self._verify(recording, graph)
        else:
            results = self._replay(recording, graph)
        self._engine.after_replay()
        return results

    def _run_undoably(self, recording: Recording, graph: Graph) -> list[Tensor]:
        """Replay on all ranks or on none.

        The copies are the graph's own where it can have such, and the optimizer is inside.
        """
        engine = self._engine
        attempt = None if graph.can_be_taken_back and engine.full else engine.attempt()
        restore_bindings = engine.save_bindings(recording)
        self._agreement.begin(f"call{self._watch.num_calls}")
        try:
            with nullcontext() if attempt is None else attempt.watching():
                results = self._run(recording, graph)
            self._settle()
        except BaseException as error:  # whatever ends it, it must leave no trace
            if attempt is None:
                graph.take_back()
            else:
                attempt.roll_back()
            restore_bindings()
            error.add_note("graphfsdp: the replay was undone: everything is as it was before it")
            if self._watch.failure is None:  # else all ranks know
                self._agreement.fail(error)
            raise
        graph.keep()
        return results

    def _settle(self) -> None:
        try:
            self._agreement.settle()
        except CaptureError as error:
            raise RankFailedError(str(error)) from error

    def stand_in(self, recording: Recording, error: BaseException, *, runs: bool) -> None:
        """Let the other ranks out of an iteration that this one cannot begin.

        Their collectives need this rank's, of whatever batch; then all hear how it ended.

        Args:
            recording: What they run.
            error: Why this one cannot; all ranks fail for it.
            runs: Without a graph: their iteration issues collectives.
        """
        if recording.graph is not None:
            self._stand_in(recording.graph, error)
            return
        attempt = self._engine.attempt()
        self._agreement.begin()
        try:
            if runs:
                with attempt.watching():
                    self._engine.iterate(recording.again())
                    self._engine.step_outside()
        except Exception as other:  # of the model, say; the first error is the one to tell
            error.add_note(f"graphfsdp: an iteration for the other ranks failed too: {other}")
        finally:
            attempt.roll_back()
            self._agreement.fail(error)

    def _stand_in(self, graph: Graph, error: BaseException) -> None:
        failure = self._watch.tell(error, Stage.BEFORE)
        if failure is not None and graph.order is not None:
            graph.order.begin()
            self._join(graph.order, failure)

    def _verify(self, recording: Recording, graph: Graph) -> list[Tensor]:
        self._engine.before_replay(recording)
        try:
            with nvtx_range("replay"):
                results = self._verifier.replay(recording)
        except VerificationError:
            raise
        except BaseException as error:
            self._after_failure(graph.effect, error)
            raise
        recording.num_verified += 1
        return results

    def _replay(self, recording: Recording, graph: Graph) -> list[Tensor]:
        try:
            self._engine.before_replay(recording)
        except BaseException as error:  # a number that is baked in, or no memory for the upload
            self._stand_in(graph, error)
            raise
        failure = self._watch.enter()
        if failure is not None:
            self._refuse(graph, failure)
        try:
            with nvtx_range("replay"):
                return graph.replay()
        except BaseException as error:  # of an operator, of a collective, or no memory
            self._after_failure(graph.effect, error)
            theirs = self._share_failure(graph, error)
            if theirs is None:
                raise
            raise theirs from error
        finally:
            self._watch.leave()

    def _refuse(self, graph: Graph, failure: Failure) -> NoReturn:
        """Do not begin what another rank has failed in."""
        if graph.order is not None:
            graph.order.begin()
            self._join(graph.order, failure)
        if failure.stage is Stage.BEFORE:
            raise failure.error()
        self.breakage = failure.breakage
        raise broken(self.breakage)

    def _share_failure(self, graph: Graph, error: BaseException) -> BaseException | None:
        """Let the other ranks out of a replay that has failed here.

        Returns:
            What is to be raised instead, where another rank failed and this error follows from it.
        """
        heard, order = self._watch.failure, graph.order
        lasting = self._watch.lasting
        if lasting is not None and lasting.call < self._watch.num_calls:
            self.breakage = lasting.breakage
            return None
        if order is not None and order.is_waiting:
            return None  # the process group is broken, here and elsewhere
        if heard is None:
            passed = graph.effect is not Effect.NONE if order is None else order.is_too_late
            if passed and self._options.undo_replays:
                return None  # they hear of it at the end of theirs
            heard = self._watch.tell(error, Stage.AFTER if passed else Stage.BEFORE)
            if heard is None:
                return None
            if passed and not self.breakage:
                # Undone here, but the others cannot be stopped any more.
                self.breakage = f"{type(error).__name__}: {_ALONE}"
                error.add_note(f"graphfsdp: {_ALONE}")
            mine = True
        else:
            mine = heard.tells_of(error)
        if order is not None:
            self._join(order, heard)
        return None if mine or heard.stage is Stage.AFTER else heard.error()

    def _join(self, order: CollectiveOrder, failure: Failure) -> None:
        """Issue the collectives that other ranks wait for, if any rank is in this replay."""
        waiting = self._watch.waiting(failure)
        try:
            if waiting.in_it and failure.call == self._watch.num_calls:
                order.stand_in(to_end=failure.stage is Stage.AFTER)
            if waiting.in_the_next:
                order.begin()
                order.stand_in(to_end=False)
        except RuntimeError as error:  # of a collective: the others have gone, or are too late
            _LOG.warning("this rank cannot stand in for the others' collectives: %s", error)

    def _after_failure(self, effect: Effect, error: BaseException) -> None:
        if not self._options.undo_replays:
            if effect is Effect.NONE:
                self._engine.gradients.drop()
            if effect is Effect.PART:
                self.breakage = f"{type(error).__name__}: {effect.value}"
            error.add_note(f"graphfsdp: {effect.value}")
        self._agreement.explain(error, self._watch.num_calls)


__all__ = ["Replayer"]
