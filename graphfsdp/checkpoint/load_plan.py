"""What is read into which tensor, worked out before anything is written.

Note [Main weights]: a float32 main weight is saved as the model's weight where the model keeps it
(sharding), beside a narrower one in the optimizer's state (``master_param``), or there as the
16 bits that a bfloat16 weight lacks. Each form loads into each other one, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphfsdp.checkpoint.manifest import Manifest, SavedTensor
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER, NamedModel, NamedPart, Part, part_of, whole
from graphfsdp.errors import CheckpointMismatchError
from graphfsdp.optim.fused.storage import join_remainder

MAIN = "master_param"


@dataclass
class LoadPlan:
    """What a load will do: read parts, then act; and what does not fit."""

    manifest: Manifest
    model: NamedModel
    elsewhere: set[str]  # names that other stages of a pipeline load
    parts: list[NamedPart] = field(default_factory=list)
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # in this order
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # the model's tensors that are left as they are

    def read_whole(self, key: str) -> Tensor:
        saved = self.manifest.tensors[key]
        tensor = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        self.parts.append((key, whole(tensor)))
        return tensor

    def refuse_problems(self, what: str, remedy: str) -> None:
        if self.problems:
            listed = "\n".join(f"  {problem}" for problem in self.problems)
            raise CheckpointMismatchError(
                f"the {what} does not fit; nothing was loaded:\n{listed}\n"
                f"Remedy: {remedy}, or strict=False, which leaves as it is what does not fit"
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

    def join(self, weight_key: str, remainder_key: str, into: Part) -> None:
        """Read a float32 main weight that was saved as bfloat16 weight and remainder."""
        weight = into.like(torch.empty_like(into.local, dtype=torch.bfloat16))
        remainder = into.like(torch.empty_like(into.local, dtype=torch.int16))
        self.parts += [(weight_key, weight), (remainder_key, remainder)]
        self.afterwards.append(
            lambda: into.local.copy_(join_remainder(weight.local, remainder.local))
        )


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
        main_key = f"{OPTIMIZER}{name}/{MAIN}"
        main = plan.manifest.tensors.get(main_key)
        _plan_weight(plan, key, main_key, main, part_of(tensor))
    for key in plan.manifest.tensors:
        name = key.removeprefix(MODEL)
        known = key in used or name in plan.elsewhere
        if key.startswith(MODEL) and not known:
            plan.problems.append(f"model: {name!r} is in the checkpoint, but not in the model")


def _plan_weight(
    plan: LoadPlan, key: str, main_key: str, main: SavedTensor | None, into: Part
) -> None:
    """From the main weight, where that has more digits to give."""
    saved = plan.manifest.tensors[key]
    if main is None or into.dtype.itemsize <= saved.dtype.itemsize:
        plan.parts.append((key, into))
    elif main.dtype != torch.int16:
        plan.parts.append((main_key, into))
    else:
        plan.join(key, main_key, into)
