"""Anything with ``state_dict`` and ``load_state_dict``: schedulers, generators, data positions."""

import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from graphfsdp.checkpoint.named import NamedModel
from graphfsdp.errors import ConfigError

# Names of ours among the objects.
RANDOM = "random"
BUFFERS = "buffers"
# Takes a state apart from those of the ranks that were there when it was saved.
_STRIDE = 0x9E3779B97F4A7C15


@runtime_checkable
class Stateful(Protocol):
    """What can be kept in a checkpoint beside model and optimizer."""

    def state_dict(self) -> Any:
        """Numbers, texts, tensors, and lists, tuples and dicts of these."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""
        ...


class BufferState:
    """The buffers of this rank's copy of a model: running statistics may differ between ranks."""

    def __init__(self, model: NamedModel) -> None:
        self._buffers = model.buffers()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._buffers)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        for name in self._buffers.keys() & state_dict.keys():
            self._buffers[name].copy_(state_dict[name])


class RandomState:
    """torch's generators of the CPU and of the current GPU, numpy's global one and Python's."""

    def __init__(self, new_rank: int | None = None) -> None:
        """Take the number of a rank that did not exist when the state was saved."""
        self._new_rank = new_rank

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        version, words, gauss = random.getstate()
        found: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            # Tensors, so that the manifest of many ranks stays short.
            "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
            "numpy": (kind, torch.from_numpy(np.array(keys)), *rest),
        }
        if torch.cuda.is_available():
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator that the state has and this machine too.

        torch's are seeded anew on a new rank, from what they would draw next and its number: it
        must not repeat what another rank draws.
        """
        torch.set_rng_state(state["torch"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if self._new_rank is not None:
            drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            torch.manual_seed((drawn + self._new_rank * _STRIDE) % 2**63)


def check_objects(objects: Mapping[str, Any]) -> None:
    for name, thing in objects.items():
        if name in (RANDOM, BUFFERS):
            raise ConfigError(f"objects may not have the name {name!r}, which is taken")
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"objects[{name!r}] is a {type(thing).__name__}, which has no state_dict() and "
                "load_state_dict(). Remedy: give it these, or wrap it"
            )
