"""The tensors of a model and of its optimizer by name, and where this rank's part of each lies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.checkpoint.parts import NamedPart, Part, part_of
from graphfsdp.checkpoint.safetensors_file import once_each
from graphfsdp.errors import CheckpointError

MODEL = "model/"
OPTIMIZER = "optimizer/"
# What wrappers put into names; a checkpoint does not depend on them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class NamedModel:
    """A model's parameters and persistent buffers by name, each once."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # other names of the same tensors
    extra: dict[str, tuple[nn.Module, Any]]  # what modules give as get_extra_state
    # By id of a parameter that fully_shard has cut, where the part here begins.
    offsets: dict[int, tuple[int, ...]]

    def buffers(self) -> dict[str, Tensor]:
        """Return the plain buffers, of which each rank may have other values."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)
        }

    def part(self, param: Tensor, value: Tensor) -> Part:
        """A state is a DTensor too, or a plain tensor: this rank's rows if it has as many as these.

        Rows may have another length, as the scales of moments do.
        """
        offsets = self.offsets.get(id(param))
        if is_dtensor(value) or not is_dtensor(param):
            return part_of(value, offsets if value.shape[:1] == param.shape[:1] else None)
        mine = part_of(param, offsets)
        if value.shape == mine.local.shape and value.shape != param.shape:
            return mine.like(value.detach())
        if offsets and value.shape[:1] == mine.local.shape[:1]:
            rest = tuple(value.shape[1:])
            place = (offsets[0], *[0] * len(rest))
            return Part(value.detach(), place, (param.shape[0], *rest))
        return part_of(value)


def name_model(model: nn.Module) -> NamedModel:
    """Find everything that ``state_dict`` gives, under names without those of wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    offsets = _offsets(model)
    found: dict[str, Tensor] = {}
    extra: dict[str, tuple[nn.Module, Any]] = {}
    for raw_name, value in model.state_dict(keep_vars=True).items():
        name = raw_name
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        owner, _, last = raw_name.rpartition(".")
        if not isinstance(value, Tensor) or last == "_extra_state":
            extra[name] = (model.get_submodule(owner), value)
            continue
        found[name] = value
    tensors, aliases = once_each(found)
    return NamedModel(tensors, aliases, extra, offsets)


def model_parts(model: NamedModel, *, with_buffers: bool = True) -> Iterator[NamedPart]:
    buffers = model.buffers()
    for name, tensor in model.tensors.items():
        if name in buffers and not with_buffers:
            continue
        yield f"{MODEL}{name}", model.part(tensor, tensor)


def name_parameters(
    model: NamedModel, optimizer: torch.optim.Optimizer
) -> list[list[tuple[str, Tensor]]]:
    """A parameter that the model does not have is named after its place in the optimizer."""
    names = {id(tensor): name for name, tensor in model.tensors.items()}
    return [
        [
            (names.get(id(param), f"param_groups[{row}][{place}]"), param)
            for place, param in enumerate(group["params"])
        ]
        for row, group in enumerate(optimizer.param_groups)
    ]


def _offsets(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return where this rank's part begins of every parameter that ``fully_shard`` has cut.

    From the layout alone: no rank is asked.
    """
    if not any(hasattr(module, "prepare_shards") for module in model.modules()):
        return {}
    from graphfsdp.sharding.module import FSDPModule, unit_of

    found: dict[int, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        unit = unit_of(module)
        if unit.is_whole:
            raise CheckpointError(
                f"unit {name!r} is unsharded, so the model holds copies of its weights. Remedy: "
                "reshard() it, and save and load between two iterations"
            )
        for item in unit.group.managed:
            if item.buffer.sharded or item.axes is not None:
                found[id(item.param)] = item.offsets()
    return found


def states_by_index(
    state_dict: Mapping[str, Any], named: Sequence[Sequence[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, parameter and key in ``state_dict["state"]`` of every parameter."""
    for group, saved in zip(named, state_dict["param_groups"], strict=True):
        for (name, param), index in zip(group, saved["params"], strict=True):
            yield name, param, index
