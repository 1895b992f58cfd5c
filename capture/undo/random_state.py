"""The random generators that an iteration may draw from, and their states before it."""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def save_random_states(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Remember every generator's state; return a function that puts the states back.

    Those are torch's, those that modules hold, Python's and NumPy's. Generators that only the loss
    function knows are seen when an operator draws from them, on a CPU; on a GPU they are not.
    """
    states = [(generator, generator.get_state()) for generator in generators_of(model, device)]
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")  # not imported for this alone
    numpy_state = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)

    return restore


def generators_of(model: nn.Module, device: torch.device) -> list[torch.Generator]:
    """Return torch's generators for the CPU and the device, and those that modules hold."""
    generators = {id(torch.default_generator): torch.default_generator}
    if device.type == "cuda":
        generator = torch.cuda.default_generators[_index(device)]
        generators[id(generator)] = generator
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                generators[id(value)] = value
    return list(generators.values())


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
