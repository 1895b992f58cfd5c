"""What is read into which tensor, worked out before anything is written.

Note [Main weights]: a float32 main weight is saved as the model's weight where the model keeps it
(sharding), or beside a narrower one in the optimizer's state (``master_param``), where Transformer
Engine may have the 16 bits that a bfloat16 weight lacks. Each form loads into each other one, bit
for bit.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like
from graphfsdp.checkpoint.manifest import Manifest
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER, NamedModel, part_of, state_part
from graphfsdp.checkpoint.values import decode
from graphfsdp.optim.fused.storage import join_remainder

MAIN = "master_param"


@dataclass
class LoadPlan:
    """What a load will do: read parts, then act; and what does not fit."""

    manifest: Manifest
    model: NamedModel
    # This rank's parts by key: a tensor may be read twice, such as a weight, also as a main weight.
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # in this order
    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # problems, unless another rank has use for it
    unread: set[str] = field(default_factory=set)  # the model's tensors that are left as they are

    def read(self, key: str, into: Tensor | None = None) -> Tensor:
        """Read into this rank's part of a tensor; without one, into a new whole one."""
        if into is None:
            dtype, shape = self.manifest.tensors[key]
            into = torch.empty(shape, dtype=dtype, device="cpu")
        self.parts.setdefault(key, []).append(into)
        return into

    def read_like(self, key: str, param: Tensor, existing: object = None) -> Tensor:
        """Read into what exists where it has the dtype and the rows, else into a new tensor."""
        dtype = self.manifest.tensors[key].dtype
        if isinstance(existing, Tensor) and existing.dtype == dtype:
            part = state_part(param, existing)
            if part is not None:
                self.read(key, part)
                return existing
        return self.read(key, new_like(param, dtype))

    def width(self, key: str) -> int:
        return self.manifest.tensors[key].dtype.itemsize

    def has_its_dtype(self, name: str, param: Tensor) -> bool:
        """Tell whether a parameter of the model was saved with the dtype that it has."""
        key = self.saved_key(name)
        return key is not None and self.manifest.tensors[key].dtype == param.dtype

    def saved_key(self, name: str) -> str | None:
        """Return the key of a model's tensor, whichever of its names it was saved under."""
        aliases = self.manifest.facts.get("aliases", {})
        others = [alias for alias, first in self.model.aliases.items() if first == name]
        for candidate in (name, aliases.get(name), *others):
            if f"{MODEL}{candidate}" in self.manifest.tensors:
                return f"{MODEL}{candidate}"
        return None

    def fits(self, key: str, shape: Sequence[int], what: str) -> bool:
        saved = self.manifest.tensors[key].shape
        if saved != tuple(shape):
            self.problems.append(f"{what}: saved {list(saved)}, here {list(shape)}")
        return saved == tuple(shape)


def plan_model(plan: LoadPlan) -> None:
    used: set[str] = set()
    for name, tensor in plan.model.tensors.items():
        key = plan.saved_key(name)
        if key is None:
            plan.problems.append(f"model: {name!r} is missing in the checkpoint")
        else:
            used.add(key.removeprefix(MODEL))
        is_own = name not in plan.model.copies
        if not is_own:
            plan.problems.append(
                f"model: {name!r} is no parameter or buffer, but what a hook of state_dict() has "
                "made, and what is loaded into that would not reach the model"
            )
        if key is None or not plan.fits(key, tensor.shape, f"model: {name!r}") or not is_own:
            plan.unread.add(name)
            continue
        # From the main weight, where that has more digits to give.
        main = f"{OPTIMIZER}{name}.{MAIN}"
        if main not in plan.manifest.tensors or plan.width(key) >= tensor.dtype.itemsize:
            plan.read(key, part_of(tensor))
        elif plan.manifest.tensors[main].dtype != torch.int16:
            plan.read(main, part_of(tensor))
        else:
            weight = plan.read(key, new_like(tensor, torch.bfloat16))
            rest = plan.read(main, new_like(tensor, torch.int16))
            plan.afterwards.append(functools.partial(_join, local_part(tensor), weight, rest))
    extra = plan.manifest.facts.get("extra", {})
    for name, (module, _) in plan.model.extra.items():
        if name in extra:
            used.add(name)
            state = decode(extra[name], plan.read)
            plan.afterwards.append(functools.partial(module.set_extra_state, state))
        else:
            plan.problems.append(f"model: {name!r} is missing in the checkpoint")
    saved = {key.removeprefix(MODEL) for key in plan.manifest.tensors if key.startswith(MODEL)}
    plan.unused += [
        f"model: {name!r} is in the checkpoint, but not in the model"
        for name in (saved | set(extra)) - used
    ]


def _join(into: Tensor, weight: Tensor, remainder: Tensor) -> None:
    into.copy_(join_remainder(local_part(weight), local_part(remainder)))


def new_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return wrap_like(torch.empty_like(local_part(param.detach()), dtype=dtype), param)
