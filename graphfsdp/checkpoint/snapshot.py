"""All that one rank saves, at one moment."""

import hashlib
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.checkpoint.named import part_of
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointError


@dataclass
class Snapshot:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Json] = field(default_factory=dict)  # of model and optimizer
    objects: dict[str, Json] = field(default_factory=dict)  # encoded states

    def keep(self, key: str, tensor: Tensor) -> str:
        """Keep this rank's part; CheckpointError: it cannot be written as numbers in memory."""
        what = ""
        if is_lazy(tensor) or tensor.is_meta:
            what = "which has no values yet"
        elif tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
            what = f"with the layout {tensor.layout}"
        elif not _is_writable(tensor.dtype):
            what = "which a safetensors file cannot hold"
        if what:
            raise CheckpointError(
                f"{key} is a tensor of {tensor.dtype}, {what}. Remedy: a dense tensor in its place "
                "that has values, of another dtype or viewed as one"
            )
        self.tensors[key] = part_of(tensor)
        return key

    def keep_plain(self, where: str, tensor: Tensor) -> str:
        """Return a key that has its digest: ranks whose tensors are equal write one."""
        if is_dtensor(tensor):
            raise CheckpointError(
                f"{where} is sharded, which only parts of a model and states of its optimizer may "
                "be. Remedy: save it as a part of the model, in an nn.ModuleDict with it"
            )
        self.keep(where, tensor)
        del self.tensors[where]
        tensor = in_bytes(tensor)
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        return self.keep(f"{where}#{hashlib.sha256(content).hexdigest()[:16]}", tensor)


def in_bytes(tensor: Tensor) -> Tensor:
    """Return it on the CPU, its memory being its values in order."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _is_writable(dtype: torch.dtype) -> bool:
    try:
        load(save({"": torch.empty(0, dtype=dtype, device="cpu")}))
    except KeyError:  # the word of safetensors for one that it cannot write, or not read back
        return False
    return True
