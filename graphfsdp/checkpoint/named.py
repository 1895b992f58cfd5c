"""The tensors of a model and of its optimizer by name, as this rank has them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor, local_part, wrap_like
from graphfsdp.errors import CheckpointError

# Of a dictionary of state dicts, as torch.distributed.checkpoint flattens it.
MODEL = "model."
OPTIMIZER = "optimizer.state."
# What wrappers put into names; a checkpoint does not depend on them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def part_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return this rank's part, for torch.distributed.checkpoint: a DTensor knows its place.

    ``like`` is a DTensor that is cut in the same way and knows better: older versions of torch say
    of DTensors made of ours that torch has cut them.
    """
    return wrap_like(local_part(tensor).detach(), tensor if like is None else like)


def once_each(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tied tensors under the first of their names alone, and that by their other names."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}  # by identity
    for name, tensor in state.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    return tensors, aliases


@dataclass(frozen=True)
class NamedModel:
    """A model's parameters and persistent buffers by name, each once."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # other names of the same tensors
    extra: dict[str, tuple[nn.Module, Any]]  # what modules give as get_extra_state

    def buffers(self) -> dict[str, Tensor]:
        """Return the plain buffers, of which each rank may have other values."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)
        }


def name_model(model: nn.Module) -> NamedModel:
    """Find everything that ``state_dict`` gives, under names without those of wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    _refuse_whole_units(model)
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
    return NamedModel(tensors, aliases, extra)


def state_part(param: Tensor, value: Tensor) -> Tensor | None:
    """Return this rank's part of a state that is cut as its parameter; None if it is not.

    A state is a DTensor too, or a plain tensor of this rank's rows.
    """
    if is_dtensor(value) and value.shape != param.shape:
        return None
    if local_part(value).shape == local_part(param).shape:
        return part_of(value, param)
    return part_of(value) if value.shape == param.shape else None


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


def _refuse_whole_units(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not hasattr(module, "prepare_shards"):
            continue
        from graphfsdp.sharding.module import unit_of

        if unit_of(module).is_whole:
            raise CheckpointError(
                f"unit {name!r} is unsharded, so the model holds copies of its weights. Remedy: "
                "reshard() it, and save and load between two iterations"
            )


def states_by_index(
    state_dict: Mapping[str, Any], named: Sequence[Sequence[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, parameter and key in ``state_dict["state"]`` of every parameter."""
    for group, saved in zip(named, state_dict["param_groups"], strict=True):
        for (name, param), index in zip(group, saved["params"], strict=True):
            yield name, param, index
