"""Limits in seconds of an idle machine: on a busy one they last longer.

With ten tasks to a processor all takes ten times as long, and a limit of the clock would tell of
the machine. These limits count the time that the load leaves, so what hangs ends everywhere.
"""

import os
from collections.abc import Callable
from time import monotonic, sleep  # under these names: captures and tests set clocks ahead

MOST = 20.0  # times as long as on an idle machine
_TICK_S = 5.0


def slowdown() -> float:
    """Return how many tasks shared a processor in the last minute; 1.0 where nobody counts them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return min(max(load / (os.cpu_count() or 1), 1.0), MOST)


class Limit:
    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._asked = monotonic()

    def left_s(self) -> float:
        """Return for how long to wait before asking again; 0.0 when the time is over."""
        now, slow = monotonic(), slowdown()
        self._left_s -= (now - self._asked) / slow
        self._asked = now
        # The load may fall: not much longer than there is left on an idle machine.
        return max(min(self._left_s * slow, max(self._left_s, _TICK_S)), 0.0)


def until(holds: Callable[[], object], seconds: float, pause_s: float = 0.002) -> bool:
    """Wait; return whether it holds."""
    limit = Limit(seconds)
    while not holds():
        if not limit.left_s():
            return False
        sleep(pause_s)
    return True
