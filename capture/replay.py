"""Runs one replay; a failed one is undone on all ranks as far as it can be."""

import logging
from contextlib import nullcontext
from typing import NoReturn

from torch import Tensor

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.ranks.agreement import Agreement
from graphfsdp._capture.ranks.collective_order import breaks_group
from graphfsdp._capture.ranks.lost_group import explain_loss
from graphfsdp._capture.ranks.rank_watch import Failure, RankWatch, Stage
from graphfsdp._capture.ranks.standing_in import StandIn
from graphfsdp._capture.recording import Recording
from graphfsdp._capture.trace.backend import Effect, Graph
from graphfsdp._capture.verify import Verifier
from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.config import CaptureOptions, UndoReplays
from graphfsdp.errors import CaptureError, RankFailedError, VerificationError, broken

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
        others: StandIn,
        verifier: Verifier,
        options: CaptureOptions,
    ) -> None:
        """Prepare.

        Args:
            engine: Runs iterations.
            agreement: With the other ranks.
            watch: Hears of their failures.
            others: Lets them out of replays that this rank cannot take part in.
            verifier: Compares replays with eager runs.
            options: What the user has chosen.
        """
        self._engine = engine
        self._agreement = agreement
        self._watch = watch
        self._others = others
        self._verifier = verifier
        self._options = options
        self._undoes_all = options.undo_replays is UndoReplays.ALWAYS
        self.breakage = ""

    def prepare(self, graph: Graph) -> None:
        """Get ready to replay a new graph; every rank does it at the same time.

        Raises:
            CaptureError: another rank failed.
        """
        if not self._agreement.is_collective:
            return
        self._others.latest_order = order = graph.order
        least = self._agreement.least(0 if order is None else order.num_before_commit)
        if order is not None and least:
            order.arm(self._watch.gate, least)

    def run(self, recording: Recording) -> list[Tensor]:
        """Replay the batch in the static inputs.

        Raises:
            GraphFSDPError: another rank has failed in this call; of the class that it has raised
                there, where that is an error about the batch or about something that changed.

        Capture: never inside one.
        """
        graph = recording.graph
        assert graph is not None
        if self._undoes_all:
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

    def _verify(self, recording: Recording, graph: Graph) -> list[Tensor]:
        self._engine.before_replay(recording)
        try:
            with nvtx_range("replay"):
                results = self._verifier.replay(recording)
        except VerificationError:
            raise
        except BaseException as error:
            self._after_failure(graph.effect, error, goes_on=True)
            raise
        recording.num_verified += 1
        return results

    def _replay(self, recording: Recording, graph: Graph) -> list[Tensor]:
        try:
            self._engine.before_replay(recording)
        except BaseException as error:  # a number that is baked in, or no memory for the upload
            self._others.tell(graph.order, error)
            raise
        failure = self._watch.enter()
        if failure is not None:
            self._refuse(graph, failure)
        try:
            with nvtx_range("replay"):
                return graph.replay()
        except BaseException as error:  # of an operator, of a collective, or no memory
            theirs: BaseException | None = self._group_is_lost(graph, error)
            self._after_failure(graph.effect, error, goes_on=theirs is None)
            theirs = theirs or self._share_failure(graph, error)
            if theirs is None:
                raise
            for note in getattr(error, "__notes__", ()):
                theirs.add_note(note)
            raise theirs from error
        finally:
            self._watch.leave()

    def _refuse(self, graph: Graph, failure: Failure) -> NoReturn:
        """Do not begin what another rank has failed in."""
        if graph.order is not None:
            graph.order.begin()
            self._others.join(graph.order, failure)
        if failure.stage is Stage.BEFORE:
            raise failure.error()
        self.breakage = failure.breakage
        raise broken(self.breakage)

    def _group_is_lost(self, graph: Graph, error: BaseException) -> RankFailedError | None:
        """Find out which rank has broken the process group, if it is broken.

        Returns:
            What is to be raised instead.
        """
        heard, order = self._watch.failure, graph.order
        told = heard is not None and heard.stage is Stage.LOST
        if order is None or not (told or (order.is_waiting and breaks_group(error))):
            return None
        theirs = explain_loss(self._watch, error)
        if theirs is not None:
            self.breakage = str(theirs)
        return theirs

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
            return None  # the process group is broken, and nobody can be asked
        if heard is None:
            passed = graph.effect is not Effect.NONE if order is None else order.is_too_late
            if passed and self._undoes_all:
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
            self._others.join(order, heard)
        return None if mine or heard.stage is Stage.AFTER else heard.error()

    def _after_failure(self, effect: Effect, error: BaseException, *, goes_on: bool) -> None:
        if not self._undoes_all:
            if effect is Effect.NONE:
                self._engine.gradients.drop()
            if effect is Effect.PART:
                self.breakage = f"{type(error).__name__}: {effect.value}"
            again = ". The step can be called again" if goes_on and not self.breakage else ""
            error.add_note(f"graphfsdp: {effect.value}{again}")
        if goes_on:
            self._agreement.explain(error, self._watch.num_calls)
