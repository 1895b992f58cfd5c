"""The tensors of a model and of its optimizer by name, as this rank has them.

A checkpoint does not know of a pipeline's stages: each tensor is saved under its name, whichever
rank has it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor, local_part, wrap_like
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.base.sharded import pipeline_stages, put_back, units_of
from graphfsdp.errors import ConfigError

# Of a dictionary of state dicts, as torch.distributed.checkpoint flattens it.
MODEL = "model."
OPTIMIZER = "optimizer.state."
# What wrappers put into names; a checkpoint does not depend on them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Stages(nn.ModuleList):
    """The stages of a pipeline on this rank, whose parts have their names in the whole model."""

    def __init__(self, stages: Sequence[Any]) -> None:
        """Hold them; ``stages`` are torch's."""
        super().__init__(stage.submod for stage in stages)
        self.indices = tuple(int(stage.stage_index) for stage in stages)


def as_module(model: Any) -> Any:
    """Return the stages of a schedule, anything else as it is."""
    stages = pipeline_stages(model)
    return Stages(stages) if stages else model


def part_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return this rank's part, for torch.distributed.checkpoint: a DTensor knows its place.

    ``like`` is a DTensor that is cut in the same way and knows better: older versions of torch say
    of DTensors made of ours that torch has cut them.
    """
    return wrap_like(local_part(tensor).detach(), tensor if like is None else like)


@dataclass(frozen=True)
class NamedModel:
    """A model's parameters and persistent buffers by name, each once."""

    tensors: dict[str, Tensor]
    extra: dict[str, tuple[nn.Module, Any]]  # what modules give as get_extra_state
    names: set[str]  # and other names of the same tensors

    def buffers(self) -> dict[str, Tensor]:
        """Return the plain buffers, of which each rank may have other values."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)
        }


def name_model(model: nn.Module) -> NamedModel:
    """Find everything that ``state_dict`` gives, under names without those of wrappers.

    Tied tensors have the first of their names; what was unsharded by hand is resharded.
    ConfigError: two stages use the same name, or what has a name is no tensor of the model.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    put_back(units_of(model))
    named = NamedModel({}, {}, set())
    met: set[int] = set()  # by identity
    own = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for stage in model if isinstance(model, Stages) else (model,):
        for raw_name, value in stage.state_dict(keep_vars=True).items():
            name = raw_name
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            owner, _, last = raw_name.rpartition(".")
            if name in named.names:
                raise refuse_name(name)
            named.names.add(name)
            if not isinstance(value, Tensor) or last == "_extra_state":
                named.extra[name] = (stage.get_submodule(owner), value)
            elif id(value) not in met:
                met.add(id(value))
                if id(value) not in own and not _shares_memory(value, own.values()):
                    raise ConfigError(
                        f"{name!r} is no parameter or buffer, but what a hook of state_dict() has "
                        "made, and what is loaded into that would not reach the model. Remedy: "
                        "take the hook off, or save and load the module inside"
                    )
                named.tensors[name] = value
    return named


def _shares_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    key = storage_key(local_part(tensor))
    return any(storage_key(local_part(other)) == key for other in others)


def state_part(param: Tensor, value: Any) -> Tensor | None:
    """Return this rank's part of a state that is cut as its parameter; None if it is not.

    A state is a DTensor too, or a plain tensor of this rank's rows.
    """
    if not isinstance(value, Tensor) or (is_dtensor(value) and value.shape != param.shape):
        return None
    if local_part(value).shape == local_part(param).shape:
        return part_of(value, param)
    return part_of(value) if value.shape == param.shape else None


def refuse_name(name: str) -> ConfigError:
    return ConfigError(
        f"two stages of the pipeline call a part {name!r}, which can be saved only once. Remedy: "
        "stages whose parts have the names that they have in the whole model: build it and "
        "delete the layers of other stages from a ModuleDict, or give stages modules that keep "
        "the names"
    )
