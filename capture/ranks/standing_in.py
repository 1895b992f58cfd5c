"""What a rank does for the others when it cannot replay with them."""

import logging
import sys

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.ranks.agreement import Agreement, WarmUpAgainError
from graphfsdp._capture.ranks.collective_order import CollectiveOrder, breaks_group
from graphfsdp._capture.ranks.lost_group import explain_end
from graphfsdp._capture.ranks.rank_watch import Failure, RankWatch, Stage, TogetherError
from graphfsdp._capture.recording import Recording
from graphfsdp.errors import broken

_LOG = logging.getLogger("graphfsdp")


class StandIn:
    """Lets the other ranks out of iterations that this one cannot take part in.

    Attributes:
        latest_order: Collectives of the graph that was made last; None before there was one.
    """

    def __init__(self, engine: Engine, agreement: Agreement, watch: RankWatch) -> None:
        """Prepare.

        Args:
            engine: Runs iterations.
            agreement: With the other ranks.
            watch: Tells them, and hears of them.
        """
        self._engine = engine
        self._agreement = agreement
        self._watch = watch
        self.latest_order: CollectiveOrder | None = None

    def call_together(self) -> None:
        """Have all ranks run this call eagerly: this one has no graph for it, others may have.

        Note [Calling together]: with batches of several kinds, one rank warms up or captures while
        others have a graph and replay. It tells them so as if it had failed, and stands in for
        their collectives; they undo their replays, and run the call eagerly with it. So all of
        them keep the call or none does, and whoever has captured has the same gate as the others.

        Raises:
            GraphFSDPError: another rank has failed in this call.
        """
        if self.latest_order is None or not self._agreement.is_collective:
            return  # nobody can have a graph
        if self._watch.lasting is not None:
            raise broken(self._watch.lasting.breakage)
        error = TogetherError("it has no graph for its batch, so all ranks run this call eagerly")
        failure = self.tell(self.latest_order, error)
        if failure is not None and not failure.is_call:
            raise failure.error()

    def stand_in(self, recording: Recording, error: BaseException, *, runs: bool) -> None:
        """Let the other ranks out of an iteration that this one cannot begin.

        Their collectives need this rank's, of whatever batch; then all hear how it ended.

        Args:
            recording: What they run.
            error: Why this one cannot; all ranks fail for it.
            runs: Without a graph: their iteration issues collectives.
        """
        if recording.graph is not None:
            failure = self.tell(recording.graph.order, error)
            if failure is None or not failure.is_call:
                return
            runs = True
        attempt = self._engine.attempt()
        self._agreement.begin()
        try:
            if runs:
                with attempt.watching():
                    self._engine.iterate(recording.again())  # the optimizer outside comes later
        except Exception as other:  # of the model, say; the first error is the one to tell
            error.add_note(f"graphfsdp: an iteration for the other ranks failed too: {other}")
        finally:
            attempt.roll_back()
            self._agreement.fail(error)

    def attempt_failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks why a warm-up or a capture was given up.

        Returns:
            What is to be raised: the same, unless it follows from what happened to another rank.

        Raises:
            CaptureError: this rank failed in a collective because another had failed before.
        """
        if breaks_group(error):
            ended = explain_end(self._watch, error)
            if ended is not None:
                ended.__cause__ = error
                return ended
        self._agreement.fail(error)
        return error

    def settle_beside_captures(self) -> None:
        """End a warm-up as captures end, in step with ranks that capture in the same call.

        Raises:
            CaptureError: another rank failed.
            WarmUpAgainError: another rank wants the call repeated.
        """
        if self._agreement.settle():
            raise WarmUpAgainError("another rank was given other numbers")
        if self._agreement.is_collective:
            self._agreement.least(sys.maxsize)
        if not self._engine.full:
            self._engine.step_outside()
            self._agreement.settle()

    def tell(self, order: CollectiveOrder | None, error: BaseException) -> Failure | None:
        """Tell the other ranks that this one cannot replay, and let them out of theirs.

        Args:
            order: Collectives of what they replay; None where nothing can stop them.
            error: Why.

        Returns:
            The failure that all ranks hear of, maybe another rank's; None if nobody listens.
        """
        failure = self._watch.tell(error, Stage.BEFORE)
        if failure is not None and order is not None:
            order.begin()
            self.join(order, failure)
        return failure

    def join(self, order: CollectiveOrder, failure: Failure) -> None:
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
