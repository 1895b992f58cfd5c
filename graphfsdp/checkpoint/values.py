"""State of ordinary objects as JSON and back: no pickle, so that reading runs no code.

Note [Tags]: what JSON lacks is an object with "!", its kind, and "of", what it holds.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from graphfsdp.errors import CheckpointError

Json = Any
StoreTensor = Callable[[str, Tensor], str]
FindTensor = Callable[[str], Tensor]

_TAG = "!"


def encode(value: Any, where: str, store: StoreTensor) -> Json:
    """``where`` names it in messages; ``store`` keeps a tensor and returns its key.

    Raises CheckpointError that names what could only be pickled.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "of": store(where, value)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}.{key}", store) for key, item in value.items()}
        items = [
            [encode(key, where, store), encode(item, f"{where}[{key!r}]", store)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "of": items}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{n}]", store) for n, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "of": items}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which could only be kept by pickling, and loading "
        "a pickle can run any code. Remedy: have state_dict() return numbers, texts, tensors, and "
        "lists, tuples and dicts of these"
    )


def decode(value: Json, find: FindTensor) -> Any:
    """Return the state that ``encode`` was given; ``find`` returns the tensor under a key."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item, find) for key, item in value.items()}
    if kind == "tensor":
        return find(value["of"])
    if kind == "tuple":
        return tuple(decode(item, find) for item in value["of"])
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in value["of"]}
    raise CheckpointError(f"the checkpoint holds a value of the kind {kind!r}, which is not known")
