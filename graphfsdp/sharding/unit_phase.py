"""What a unit is doing."""

import enum


class UnitPhase(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    FORWARD = "forward"
