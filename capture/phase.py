"""The life of a captured step."""

import enum

from graphfsdp.errors import PhaseError


class Phase(enum.Enum):
    """What the next call of a captured step does."""

    WARMUP = "warmup"  # runs eagerly; after enough of these, the next call captures
    CAPTURE = "capture"  # is recording now
    REPLAY = "replay"  # launches the graph
    EAGER = "eager"  # scope "none": runs eagerly for ever
    BROKEN = "broken"  # an iteration stopped while it updated weights; refuses
    CLOSED = "closed"  # refuses

    def to(self, target: "Phase") -> "Phase":
        """Return ``target`` if this phase may be followed by it.

        Raises:
            PhaseError: the transition is not legal.
        """
        if target not in dict(_LEGAL)[self]:
            raise PhaseError(f"a captured step cannot go from {self.value} to {target.value}")
        return target


# WARMUP follows CAPTURE when a capture failed: everything was rolled back, another may be tried.
# CAPTURE follows REPLAY when another kind of batch gets its graph, WARMUP and EAGER when something
# has changed that all graphs have baked in.
# BROKEN follows where a replay stopped in the middle, or another rank has failed.
_LEGAL = (
    (Phase.WARMUP, (Phase.CAPTURE, Phase.EAGER, Phase.BROKEN, Phase.CLOSED)),
    (Phase.CAPTURE, (Phase.REPLAY, Phase.WARMUP, Phase.CLOSED)),
    (Phase.REPLAY, (Phase.CAPTURE, Phase.WARMUP, Phase.BROKEN, Phase.CLOSED)),
    (Phase.EAGER, (Phase.BROKEN, Phase.CLOSED)),
    (Phase.BROKEN, (Phase.CLOSED,)),
    (Phase.CLOSED, ()),
)
