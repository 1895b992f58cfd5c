"""What gives another value each time that it is asked: generators of random numbers, iterators."""

import operator
import random
import types
from gc import get_referents
from itertools import count
from typing import Any

import numpy as np

_RANDOM = (random.Random, np.random.RandomState, np.random.Generator)


def is_drawn_from(value: Any) -> bool:
    if isinstance(value, _RANDOM):
        return not isinstance(value, random.SystemRandom)
    kind = type(value)
    is_pythons = kind.__module__.partition(".")[0] in ("builtins", "itertools")
    return is_pythons and callable(getattr(kind, "__next__", None))


def shared_generators() -> dict[str, tuple[Any, str]]:
    """Return the generators that the functions of Python's and NumPy's modules draw from."""
    numpys: Any = np.random.mtrand
    return {"random": (random._inst, "random"), "numpy.random": (numpys._rand, ".random")}


def words_for(title: str, value: Any) -> str:
    if isinstance(value, _RANDOM):
        return f"draws from a generator of Python or NumPy ({title})"
    return f"advances an iterator ({title})"


def state_of(value: Any) -> Any:
    """Return what tells how far a generator or an iterator has come."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        state: Any = value.get_state()
        return (state[0], state[1].tobytes(), *state[2:])
    return _position_of(value, 0)


def _position_of(value: Any, depth: int) -> Any:
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "finished"
        parts: Any = (frame.f_lasti, *frame.f_locals.values(), *get_referents(value))
    elif isinstance(value, tuple):
        parts = value
    elif callable(getattr(type(value), "__next__", None)) and not hasattr(value, "__dict__"):
        parts = (operator.length_hint(value, -1), *get_referents(value))
    else:
        return type(value).__name__
    return tuple(_position_of(part, depth + 1) for part in parts) if depth < 6 else None
