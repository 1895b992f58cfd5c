"""State of ordinary objects as JSON and back: no pickle, so that reading runs no code.

Note [Tags]: what JSON lacks is written as an object whose only or first key is "!", the kind.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.errors import CheckpointError

Json = Any
StoreTensor = Callable[[str, Tensor], str]
FindTensor = Callable[[str], Tensor]

_TAG = "!"
# Larger tensors lie in the data files, smaller ones beside the numbers.
INLINE_BYTES = 1 << 14


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint names the dtype {name!r}, which torch does not have")
    return dtype


def refuse_no_bytes(where: str, tensor: Tensor) -> None:
    """Refuse a tensor that is more, or less, than numbers in memory."""
    if is_lazy(tensor):
        kind = "a lazy tensor that has no shape yet"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, which has no values"
    elif tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
        kind = f"a tensor of {tensor.dtype} with the layout {tensor.layout}"
    else:
        return
    raise CheckpointError(
        f"{where} is {kind}; expected numbers in plain memory. Remedy: a dense tensor in its place "
        "that has values"
    )


def tensor_under(key: str) -> Json:
    """Return what stands for a tensor that lies in the data files."""
    return {_TAG: "tensor", "key": key}


def encode(value: Any, where: str, store: StoreTensor) -> Json:
    """``where`` names it in messages and names large tensors, which ``store`` keeps.

    Raises CheckpointError that names what could only be pickled.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # also of subclasses, such as those of Enum
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {_TAG: "float", "value": repr(number)}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, store)
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, store)
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(item, f"{where}[{n}]", store) for n, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {_TAG: "tuple" if isinstance(value, tuple) else "set", "items": items}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "base64": _to_text(bytes(value))}
    if isinstance(value, io.BytesIO):
        return {_TAG: "file", "base64": _to_text(value.getvalue())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {
            _TAG: "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": _to_text(value.tobytes()),
        }
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": dtype_name(value)}
    if isinstance(value, torch.device):
        return {_TAG: "device", "name": str(value)}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which could only be kept by pickling, and loading "
        "a pickle can run any code. Remedy: have state_dict() return numbers, texts, tensors and "
        "collections of these"
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
    if kind == "float":
        return float(value["value"])
    if kind in ("tuple", "set"):
        items = [decode(item, find) for item in value["items"]]
        return tuple(items) if kind == "tuple" else set(items)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in value["items"]}
    if kind == "tensor":
        return find(value["key"]) if "key" in value else _decode_tensor(value)
    if kind in ("bytes", "file"):
        content = base64.b64decode(value["base64"])
        return content if kind == "bytes" else io.BytesIO(content)
    if kind in ("array", "scalar"):
        content = base64.b64decode(value["base64"])
        array = np.frombuffer(content, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
        return array.copy() if kind == "array" else array[()]
    if kind == "dtype":
        return dtype_of(value["name"])
    if kind == "device":
        return torch.device(value["name"])
    raise CheckpointError(f"the checkpoint holds a value of the kind {kind!r}, which is not known")


def _encode_mapping(value: Mapping[Any, Any], where: str, store: StoreTensor) -> Json:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, f"{where}.{key}", store) for key, item in value.items()}
    items = [
        [encode(key, where, store), encode(item, f"{where}[{key!r}]", store)]
        for key, item in value.items()
    ]
    return {_TAG: "dict", "items": items}


def _encode_tensor(value: Tensor, where: str, store: StoreTensor) -> Json:
    refuse_no_bytes(where, value)
    if is_dtensor(value) or value.nbytes > INLINE_BYTES:
        return tensor_under(store(where, value))
    found = {_TAG: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    value = value.detach()
    if value.dim() == 0 and not value.is_complex() and math.isfinite(value.item()):
        return {**found, "value": value.item()}  # exact: a Python float has 53 bits
    flat = in_bytes(value).reshape(-1)
    return {**found, "base64": _to_text(flat.view(torch.uint8).numpy().tobytes())}


def in_bytes(tensor: Tensor) -> Tensor:
    """Return it on the CPU, its memory being its values in order."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _decode_tensor(value: dict[str, Json]) -> Tensor:
    dtype, shape = dtype_of(value["dtype"]), value["shape"]
    if "value" in value:
        return torch.tensor(value["value"], dtype=dtype, device="cpu")
    content = bytearray(base64.b64decode(value["base64"]))
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


def _to_text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
