"""The life of a captured step."""

import enum


class Phase(enum.Enum):
    """What the next call of a captured step does."""

    WARMUP = "warmup"  # runs eagerly; after enough of these, the next call captures
    CAPTURE = "capture"  # is recording now
    REPLAY = "replay"  # launches the graph
    EAGER = "eager"  # scope "none": runs eagerly for ever
    BROKEN = "broken"  # an iteration stopped while it updated weights; refuses
    CLOSED = "closed"  # refuses
