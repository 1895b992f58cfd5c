"""Ranks that share a model keep an iteration together or not at all."""

from graphfsdp._capture.ranks.failure import RankFailures
from graphfsdp.base.rank_agreement import RankAgreement
from graphfsdp.errors import CaptureError

_AGAIN = "again"


class WarmUpAgainError(Exception):
    """A rank wants this attempt undone and repeated, with one more warm-up before it."""


class Agreement:
    """The ranks' exchange about warm-ups and captures.

    A rank that captured while another did not would wait for ever in the first collective of its
    replay; one that stepped while another rolled back would train another model. So each rank
    waits until all have come as far, or one has failed.
    """

    def __init__(self, failures: RankFailures) -> None:
        self._failures = failures
        self._ranks = RankAgreement(failures.groups, "attempts")
        self.is_collective = failures.is_collective
        self._call, self._num_settled = "", 0

    def settle(self, *, again: bool = False) -> None:
        """Wait until every rank has come as far as this one.

        CaptureError names another rank that failed and says why. WarmUpAgainError: a rank wants the
        attempt repeated; all ranks raise it.
        """
        if self._call != self._failures.name:
            self._call, self._num_settled = self._failures.name, 0
        self._num_settled += 1
        told = self._ranks.exchange(
            _AGAIN if again else "",
            stage=f"{self._call}/{self._num_settled}",
            heard=self._failures.refuse_failure,
        )
        if _AGAIN in told.values():
            raise WarmUpAgainError("a rank was given other numbers than in the warm-up")

    def repeat(self, error: BaseException) -> BaseException:
        """Propose to all ranks to repeat an attempt: none does unless all do.

        Returned is a WarmUpAgainError, or what another rank has failed of.
        """
        try:
            self.settle(again=True)
        except CaptureError as failure:
            return failure
        except WarmUpAgainError:
            return WarmUpAgainError(str(error))
        return error
