"""What is read into which tensor, worked out before anything is written.

Note [Main weights]: a float32 main weight is saved as the model's weight where the model keeps it
(sharding), or beside a narrower one in the optimizer's state (``master_param``). Each form loads
into the other one, bit for bit. Transformer Engine may have there the 16 bits that a bfloat16
weight lacks; those load beside such a weight alone.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like
from graphfsdp.checkpoint.manifest import SavedTensor
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER, NamedModel, part_of, state_part
from graphfsdp.checkpoint.values import Json, decode

MAIN = "master_param"


@dataclass
class LoadPlan:
    """What a load will do: read parts, then act; and what does not fit."""

    facts: Mapping[str, Json]
    saved: Mapping[str, SavedTensor]
    model: NamedModel
    # This rank's parts by key: a tensor may be read twice, such as a weight, also as a main weight.
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # in this order
    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # problems, unless another rank has use for it

    def read(self, key: str, into: Tensor | None = None) -> Tensor:
        """Read into this rank's part of a tensor; without one, into a new whole one."""
        if into is None:
            dtype, shape = self.saved[key]
            into = torch.empty(shape, dtype=dtype, device="cpu")
        self.parts.setdefault(key, []).append(into)
        return into

    def read_like(self, key: str, param: Tensor, existing: object = None) -> Tensor:
        """Read into what exists where it has the dtype and the rows, else into a new tensor."""
        dtype = self.saved[key].dtype
        if isinstance(existing, Tensor) and existing.dtype == dtype:
            part = state_part(param, existing)
            if part is not None:
                self.read(key, part)
                return existing
        return self.read(key, new_like(param, dtype))


def plan_model(plan: LoadPlan) -> None:
    for name, tensor in plan.model.tensors.items():
        key = f"{MODEL}{name}"
        if key not in plan.saved:
            plan.problems.append(f"model: {name!r} is missing in the checkpoint")
            continue
        dtype, shape = plan.saved[key]
        if shape != tuple(tensor.shape):
            plan.problems.append(f"model: {name!r}: saved {list(shape)}, here {list(tensor.shape)}")
            continue
        # From the main weight, where that has more digits to give.
        main = f"{OPTIMIZER}{name}.{MAIN}"
        if main not in plan.saved or dtype.itemsize >= tensor.dtype.itemsize:
            plan.read(key, part_of(tensor))
        elif plan.saved[main].dtype == torch.float32:
            plan.read(main, part_of(tensor))
        else:
            plan.problems.append(
                f"model: {name!r}: saved in {dtype} and the bits that it lacks, here {tensor.dtype}"
            )
    extra = plan.facts["extra"]
    for name, (module, _) in plan.model.extra.items():
        if name in extra:
            state = decode(extra[name], plan.read)
            plan.afterwards.append(functools.partial(module.set_extra_state, state))
        else:
            plan.problems.append(f"model: {name!r} is missing in the checkpoint")
    saved = {key.removeprefix(MODEL) for key in plan.saved if key.startswith(MODEL)}
    here = plan.model.tensors.keys() | plan.model.extra.keys()
    plan.unused += [
        f"model: {name!r} is in the checkpoint, but not in the model"
        for name in (saved | extra.keys()) - here
    ]


def new_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return wrap_like(torch.empty_like(local_part(param.detach()), dtype=dtype), param)
