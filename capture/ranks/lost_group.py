"""A process group that a collective's error has broken: whose fault it is, and what is left."""

from graphfsdp._capture.ranks.rank_watch import GROUP_IS_LOST, Failure, RankWatch, Stage
from graphfsdp.errors import CaptureError, RankFailedError


def explain_loss(watch: RankWatch, error: BaseException) -> RankFailedError | None:
    """Return what is to be raised for a collective's error in a replay.

    Args:
        watch: Knows the other ranks.
        error: Of the collective.

    Returns:
        An error that names the ranks that have ended or failed; None if nobody can be asked.
    """
    if not watch.is_listening:
        return None
    failure = watch.failure or watch.tell(error, Stage.LOST)
    return RankFailedError(f"{_cause(watch, failure, error)}. {GROUP_IS_LOST}")


def explain_end(watch: RankWatch, error: BaseException) -> CaptureError | None:
    """Return what is to be raised for a collective's error in a warm-up or a capture.

    Args:
        watch: Knows the other ranks.
        error: Of the collective.

    Returns:
        An error that names the ranks that have ended; None if there are none, or nobody knows.
    """
    failure = watch.tell(error, Stage.LOST) if watch.is_listening else None
    roll_call = None if failure is None else watch.roll_call(failure)
    if roll_call is None or not roll_call.silent:
        return None
    return CaptureError(
        f"{_ended(roll_call.silent)}: {_shortened(str(error))}. Parameters, buffers, gradients "
        f"and optimizer state are as they were before this iteration. {GROUP_IS_LOST}"
    )


def _cause(watch: RankWatch, failure: Failure | None, error: BaseException) -> str:
    text = _shortened(str(error))
    if failure is not None and failure.stage is not Stage.LOST:
        return f"{failure}. So this rank waited for it in a collective in vain"
    roll_call = None if failure is None else watch.roll_call(failure)
    if roll_call is None:
        return (
            "a collective failed, and the key-value store of the process group does not answer "
            f"either: the process that hosts it (rank 0, unless a launcher does) has ended: {text}"
        )
    if roll_call.silent:
        return f"{_ended(roll_call.silent)}: {text}"
    if roll_call.outside:
        names = _listed(roll_call.outside)
        return f"{names} took no part in a replay that the other ranks have begun: {text}"
    return f"a collective failed although all ranks answer: {text}"


def _ended(names: tuple[str, ...]) -> str:
    return f"{_listed(names)} ended, or did not answer for a second"


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _shortened(text: str) -> str:
    """Return what gloo says without its file and line in front and its advice behind."""
    _, found, rest = text.partition("] ")
    return (rest if text.startswith("[") and found else text).partition(". ")[0]
