"""What is read into which tensor, worked out before anything is written.

Note [Main weights]: a float32 main weight is saved as the model's weight where the model keeps it
(sharding), or beside a narrower one in the optimizer's state (``master_param``), where Transformer
Engine and version 0.1 may have the 16 bits that a bfloat16 weight lacks. Each form loads into each
other one, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like
from graphfsdp.checkpoint.manifest import Manifest
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER, NamedModel, part_of
from graphfsdp.errors import CheckpointMismatchError
from graphfsdp.optim.fused.storage import join_remainder

MAIN = "master_param"


@dataclass
class LoadPlan:
    """What a load will do: read parts, then act; and what does not fit."""

    manifest: Manifest
    model: NamedModel
    elsewhere: set[str]  # names that other stages of a pipeline load
    parts: list[tuple[str, Tensor]] = field(default_factory=list)  # key, this rank's part
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # in this order
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # the model's tensors that are left as they are

    def read_whole(self, key: str) -> Tensor:
        dtype, shape = self.manifest.tensors[key]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.parts.append((key, tensor))
        return tensor

    def refuse_problems(self, folder: Path) -> None:
        if self.problems:
            listed = "\n".join(f"  {problem}" for problem in self.problems)
            raise CheckpointMismatchError(
                f"the checkpoint {folder} does not fit; nothing was loaded:\n{listed}\n"
                "Remedy: the model and optimizer that were saved, or strict=False, which leaves as "
                "it is what does not fit"
            )

    def filled(self) -> Iterator[Tensor]:
        for name, tensor in self.model.tensors.items():
            if name not in self.unread:
                yield tensor

    def saved_key(self, name: str) -> str | None:
        """Return the key of a model's tensor, whichever of its names it was saved under."""
        aliases = self.manifest.facts.get("aliases", {})
        others = [alias for alias, first in self.model.aliases.items() if first == name]
        for candidate in (name, aliases.get(name), *others):
            if candidate is not None and f"{MODEL}{candidate}" in self.manifest.tensors:
                return f"{MODEL}{candidate}"
        return None

    def fits(self, key: str, shape: Sequence[int], what: str) -> bool:
        saved = self.manifest.tensors[key].shape
        if saved != tuple(shape):
            self.problems.append(f"{what}: saved {list(saved)}, here {list(shape)}")
        return saved == tuple(shape)

    def read_main(self, weight_key: str, main_key: str, into: Tensor) -> None:
        """Read a main weight; one that was saved as the bits that its weight lacks, with that."""
        if self.manifest.tensors[main_key].dtype != torch.int16:
            self.parts.append((main_key, into))
            return
        local = local_part(into)
        weight = torch.empty_like(local, dtype=torch.bfloat16)
        remainder = torch.empty_like(local, dtype=torch.int16)
        self.parts.append((weight_key, wrap_like(weight, into)))
        self.parts.append((main_key, wrap_like(remainder, into)))
        self.afterwards.append(lambda: local.copy_(join_remainder(weight, remainder)))


def plan_model(plan: LoadPlan) -> None:
    used: set[str] = set()
    for name, tensor in plan.model.tensors.items():
        key = plan.saved_key(name)
        if key is None:
            plan.problems.append(f"model: {name!r} is missing in the checkpoint")
            plan.unread.add(name)
            continue
        used.add(key)
        if not plan.fits(key, tensor.shape, f"model: {name!r}"):
            plan.unread.add(name)
            continue
        # From the main weight, where that has more digits to give.
        main_key = f"{OPTIMIZER}{name}.{MAIN}"
        is_wider = tensor.dtype.itemsize > plan.manifest.tensors[key].dtype.itemsize
        if is_wider and main_key in plan.manifest.tensors:
            plan.read_main(key, main_key, part_of(tensor))
        else:
            plan.parts.append((key, part_of(tensor)))
    for key in plan.manifest.tensors:
        name = key.removeprefix(MODEL)
        known = key in used or name in plan.elsewhere
        if key.startswith(MODEL) and not known:
            plan.problems.append(f"model: {name!r} is in the checkpoint, but not in the model")
