"""The random number generators of this process as one object with a state."""

import random
from typing import Any

import numpy as np
import torch

# Takes a state apart from those of the ranks that were there when it was saved.
_STRIDE = 0x9E3779B97F4A7C15


class RandomState:
    """torch's generators of the CPU and of the current GPU, numpy's global one and Python's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        found: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [kind, keys, position, has_gauss, gauss],
        }
        if torch.cuda.is_available():
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator that the state has and this machine too."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys, position, has_gauss, gauss))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    def diverge(self, rank: int) -> None:
        """Seed torch's generators anew, from what they would draw next and a rank.

        For a rank that did not exist when the state was saved: it must not repeat another's.
        """
        drawn = int(torch.randint(2**62, (), dtype=torch.int64))
        torch.manual_seed((drawn + rank * _STRIDE) % 2**63)
