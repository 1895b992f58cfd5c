"""How many warm-ups a step has had, and how many it needs."""

from graphfsdp._capture.recording import Recording, Recordings


class WarmUps:
    """Counts the warm-ups of a step.

    Attributes:
        num: Those that have taken effect.
    """

    def __init__(self, recordings: Recordings, num_wanted: int) -> None:
        """Begin to count.

        Args:
            recordings: Of the step.
            num_wanted: Warm-ups of the step before its first capture; each kind of batch has one
                at least, unless this is 0.
        """
        self.num = 0
        self._recordings = recordings
        self._num_wanted = num_wanted

    def capture_follows(self, recording: Recording, num_more: int = 0) -> bool:
        """Tell whether so many warm-ups from now the next call with such a batch captures."""
        is_warm = self.num + num_more >= self._num_wanted
        return is_warm and recording.num_eager + num_more >= min(self._num_wanted, 1)

    def count(self, recording: Recording) -> bool:
        """Count an iteration that stands, if it was a warm-up.

        Returns:
            Whether the step keeps recordings of such batches.
        """
        is_own = recording in self._recordings
        if recording.graph is None:
            recording.num_eager += 1
            self.num += is_own
        return is_own
