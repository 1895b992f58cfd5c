"""The moments of a run that a log in the style of MLPerf wants to know; here they go nowhere."""

from types import TracebackType
from typing import Self

import graphfsdp


class RunLog:
    """Hears of the moments of a run and keeps nothing. A context manager.

    Samples are sequences trained on since the start, all ranks together.
    """

    def run_starts(self, step: graphfsdp.CapturedStep) -> None:
        """The graph is captured, everything is put back, and no data has been touched."""

    def block_starts(self, num_samples: int) -> None:
        """Training goes on until the next validation."""

    def trained(self, num_samples: int) -> None:
        """Another iteration is done, or on its way on the device."""

    def block_stops(self, num_samples: int) -> None:
        """A validation is about to begin."""

    def validated(self, num_samples: int, loss: float) -> None:
        """A validation has ended."""

    def run_stops(self, num_samples: int, *, success: bool) -> None:
        """The target is reached, or the last iteration done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Note that the run ended on its way, if it did."""
