"""Anything with ``state_dict`` and ``load_state_dict``: schedulers, generators, data positions."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.checkpoint.named import NamedModel, as_module, part_of
from graphfsdp.checkpoint.values import Json, encode, in_bytes
from graphfsdp.errors import CheckpointError, ConfigError

# Names of ours among the objects.
RANDOM = "random"
BUFFERS = "buffers"
# Takes a state apart from those of the ranks that were there when it was saved.
_STRIDE = 0x9E3779B97F4A7C15


@runtime_checkable
class Stateful(Protocol):
    """What can be kept in a checkpoint beside model and optimizer."""

    def state_dict(self) -> Any:
        """Numbers, texts, tensors and collections of these."""
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
        """Copy what fits into the buffers; what does not was reported with the model."""
        for name, tensor in self._buffers.items():
            saved = state_dict.get(name)
            if saved is not None and saved.shape == tensor.shape:
                tensor.copy_(saved)


class RandomState:
    """torch's generators of the CPU and of the current GPU, numpy's global one and Python's."""

    def __init__(self, new_rank: int | None = None) -> None:
        """Take the number of a rank that did not exist when the state was saved."""
        self._new_rank = new_rank

    def state_dict(self) -> dict[str, Any]:
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
        """Set every generator that the state has and this machine too.

        torch's are seeded anew on a new rank, from what they would draw next and its number: it
        must not repeat what another rank draws.
        """
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys, position, has_gauss, gauss))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if self._new_rank is not None:
            drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            torch.manual_seed((drawn + self._new_rank * _STRIDE) % 2**63)


@dataclass
class Snapshot:
    """All that one rank saves, at one moment."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Json] = field(default_factory=dict)  # for the manifest
    objects: dict[str, Json] = field(default_factory=dict)  # encoded states

    def store(self, where: str, tensor: Tensor) -> str:
        """A plain tensor's key has its digest: ranks whose tensors are equal write one."""
        if not is_dtensor(tensor):
            tensor = in_bytes(tensor)
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            where = f"{where}#{hashlib.sha256(content).hexdigest()[:16]}"
        self.tensors[where] = part_of(tensor)
        return where

    def add_objects(self, objects: Mapping[str, Stateful]) -> None:
        for name, thing in objects.items():
            state = thing.state_dict()
            try:
                self.objects[name] = encode(state, f"objects/{name}", self.store)
            except RecursionError:
                raise CheckpointError(
                    f"the state of objects[{name!r}] holds itself, or is nested too deeply"
                ) from None


def check_arguments(model: object, optimizer: object, objects: Mapping[str, Any] | None) -> None:
    """Refuse what is of another type than ``save`` and ``load`` take."""
    for name, given, expected, holds in (
        ("model", model, "a module", isinstance(as_module(model), nn.Module)),
        (
            "optimizer",
            optimizer,
            "one optimizer, or None",
            optimizer is None or hasattr(optimizer, "param_groups"),
        ),
        ("objects", objects, "a mapping, or None", isinstance(objects, Mapping | None)),
    ):
        if not holds:
            raise ConfigError(f"{name} must be {expected}, got a {type(given).__name__}")
    for name, thing in (objects or {}).items():
        if name in (RANDOM, BUFFERS):
            raise ConfigError(f"objects may not have the name {name!r}, which is taken")
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"objects[{name!r}] is a {type(thing).__name__}, which has no state_dict() and "
                "load_state_dict(). Remedy: give it these, or wrap it"
            )
