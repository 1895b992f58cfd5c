"""The tensors of a model and of its optimizer by name, and which part of each this rank has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.base.torch_internals import part_and_offset
from graphfsdp.checkpoint.safetensors_file import once_each
from graphfsdp.errors import CheckpointError

MODEL = "model/"
OPTIMIZER = "optimizer/"
# What wrappers put into names; a checkpoint does not depend on them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


Box = tuple[slice, ...]


def box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a tensor: its elements, which loading writes, and where they belong."""

    local: Tensor
    offsets: tuple[int, ...]
    whole_shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return box(self.offsets, self.local.shape)

    def like(self, local: Tensor) -> "Part":
        """Return the same part with other elements, which may have another dtype."""
        return Part(local, self.offsets, self.whole_shape)


# Key of a tensor in the checkpoint, and what this rank has of it.
NamedPart = tuple[str, Part]


def whole(tensor: Tensor) -> Part:
    return Part(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


def part_of(tensor: Tensor, like: Tensor | None = None) -> Part:
    """``like`` is a DTensor with the same rows, which knows better where they begin.

    Older versions of torch make DTensors of ours that say that torch has cut them.
    """
    if not is_dtensor(tensor):
        return whole(tensor)
    cut: Any = tensor if like is None else like
    shape = tuple(tensor.shape)
    _, known = part_and_offset(cut.shape, cut.device_mesh, cut.placements)
    offsets = (*known, *[0] * len(shape))[: len(shape)]
    return Part(local_part(tensor), offsets, shape)


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


def state_part(param: Tensor, value: Tensor) -> Part:
    """A state is a DTensor too, or a plain tensor: this rank's rows if it has as many as these.

    Rows may have another length, as the scales of moments do.
    """
    if not is_dtensor(param):
        return part_of(value)
    if is_dtensor(value):
        return part_of(value, param if value.shape[:1] == param.shape[:1] else None)
    mine = part_of(param)
    if value.shape == mine.local.shape and value.shape != param.shape:
        return mine.like(value.detach())
    if param.dim() and value.shape[:1] == mine.local.shape[:1]:
        rest = tuple(value.shape[1:])
        place = (mine.offsets[0], *[0] * len(rest))
        return Part(value.detach(), place, (param.shape[0], *rest))
    return part_of(value)


def model_parts(model: NamedModel, *, with_buffers: bool = True) -> Iterator[NamedPart]:
    buffers = model.buffers()
    for name, tensor in model.tensors.items():
        if name in buffers and not with_buffers:
            continue
        yield f"{MODEL}{name}", part_of(tensor)


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
