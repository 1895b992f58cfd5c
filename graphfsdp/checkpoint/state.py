"""What a rank has of a model and its optimizer by name, and other states as JSON.

A checkpoint does not know of a pipeline's stages: each tensor is saved under its name, whichever
rank has it. Nothing is pickled, so reading runs no code.

Note [Tags]: what JSON lacks is an object with "!", its kind, and "of", what it holds.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from graphfsdp.base.dtensors import is_dtensor, local_part, wrap_like
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.base.protocols import pipeline_stages, put_back, units_of
from graphfsdp.checkpoint.folder import Json
from graphfsdp.errors import CheckpointError, ConfigError

# Of a dictionary of state dicts, as torch.distributed.checkpoint flattens it.
MODEL = "model."
OPTIMIZER = "optimizer.state."
STEP = "step"  # a number beside an optimizer's other states, also that of a 0-D parameter
# What wrappers put into names; a checkpoint does not depend on them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_TAG = "!"
# Takes a state apart from those of the ranks that were there when it was saved.
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class NamedModel:
    """A model's parameters and persistent buffers by name, each once."""

    module: nn.Module  # of a pipeline, a list of the stages on this rank
    stages: tuple[int, ...]  # their numbers; none if it is no pipeline
    tensors: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, tuple[nn.Module, Any]] = field(default_factory=dict)  # of get_extra_state
    names: set[str] = field(default_factory=set)  # and other names of the same tensors

    def buffers(self) -> dict[str, Tensor]:
        """Return the plain buffers, of which each rank may have other values."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)
        }


def name_model(model: Any) -> NamedModel:
    """Find everything that ``state_dict`` gives, under names without those of wrappers.

    ``model`` is a module or a schedule of torch's pipelines. Tied tensors have the first of their
    names; what was unsharded by hand is resharded. ConfigError: two stages use the same name, or
    what has a name is no tensor of the model.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    stages = pipeline_stages(model)
    roots = [stage.submod for stage in stages] or [model]
    named = NamedModel(
        nn.ModuleList(roots) if stages else model, tuple(int(each.stage_index) for each in stages)
    )
    put_back(units_of(named.module))
    own = (*named.module.parameters(), *named.module.buffers())
    memory = {storage_key(local_part(tensor)) for tensor in own}
    met: set[int] = set()  # by identity
    for root in roots:
        for raw_name, value in root.state_dict(keep_vars=True).items():
            name = raw_name
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            owner, _, last = raw_name.rpartition(".")
            if name in named.names:
                raise refuse_name(name)
            named.names.add(name)
            if not isinstance(value, Tensor) or last == "_extra_state":
                named.extra[name] = (root.get_submodule(owner), value)
            elif storage_key(local_part(value)) not in memory:
                raise ConfigError(
                    f"{name!r} is no parameter or buffer, but what a hook of state_dict() has "
                    "made, and what is loaded into that would not reach the model. Remedy: "
                    "take the hook off, or save and load the module inside"
                )
            elif id(value) not in met:
                met.add(id(value))
                named.tensors[name] = value
    return named


def refuse_name(name: str) -> ConfigError:
    return ConfigError(
        f"two stages of the pipeline call a part {name!r}, which can be saved only once. Remedy: "
        "stages whose parts have the names that they have in the whole model: build it and "
        "delete the layers of other stages from a ModuleDict, or give stages modules that keep "
        "the names"
    )


def params_by_name(
    model: NamedModel, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[int, str, Tensor, Any]]:
    """Yield row of the group, name, and key in ``state_dict["state"]`` of every parameter."""
    names = {id(tensor): name for name, tensor in model.tensors.items()}
    rows = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for row, (group, saved) in enumerate(rows):
        for place, (param, index) in enumerate(zip(group["params"], saved["params"], strict=True)):
            if id(param) not in names:
                raise ConfigError(
                    f"parameter {place} of the optimizer's group {row} is none of the model's, and "
                    "would not be saved. Remedy: a model that holds all that is trained, such as "
                    "an nn.ModuleList"
                )
            yield row, names[id(param)], param, index


def part_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return this rank's part, for torch.distributed.checkpoint: a DTensor knows its place.

    ``like`` is a DTensor that is cut in the same way and knows better: older versions of torch say
    of DTensors made of ours that torch has cut them.
    """
    return wrap_like(local_part(tensor).detach(), tensor if like is None else like)


def state_part(param: Tensor, value: Any) -> Tensor | None:
    """Return this rank's part of a state that is cut as its parameter; None if it is not.

    A state is a DTensor too, or a plain tensor of this rank's rows.
    """
    if not isinstance(value, Tensor) or (is_dtensor(value) and value.shape != param.shape):
        return None
    if local_part(value).shape == local_part(param).shape:
        return part_of(value, param)
    return part_of(value) if value.shape == param.shape else None


def checked_objects(objects: Mapping[str, Any] | None) -> dict[str, Stateful]:
    for name, thing in (objects or {}).items():
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"objects[{name!r}] is a {type(thing).__name__}, which has no state_dict() and "
                "load_state_dict(). Remedy: give it these, or wrap it"
            )
    return dict(objects or {})


def encode(value: Any, where: str, store: Callable[[str, Tensor], str]) -> Json:
    """``where`` names it in messages; ``store`` keeps a tensor and returns its key.

    Raises CheckpointError that names what could only be pickled.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "of": store(where, value)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}.{key}", store) for key, item in value.items()}
        items = [
            [encode(key, where, store), encode(item, f"{where}[{key!r}]", store)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "of": items}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{n}]", store) for n, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "of": items}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which could only be kept by pickling, and loading "
        "a pickle can run any code. Remedy: have state_dict() return numbers, texts, tensors, and "
        "lists, tuples and dicts of these"
    )


def decode(value: Json, find: Callable[[str], Tensor]) -> Any:
    """Return the state that ``encode`` was given; ``find`` returns the tensor under a key."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item, find) for key, item in value.items()}
    if kind == "tensor":
        return find(value["of"])
    if kind == "tuple":
        return tuple(decode(item, find) for item in value["of"])
    return {decode(key, find): decode(item, find) for key, item in value["of"]}


def random_state() -> dict[str, Any]:
    """Return torch's generators of the CPU and of the current GPU, numpy's global one, Python's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # Tensors, so that the manifest of many ranks stays short.
        "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (kind, torch.from_numpy(np.array(keys)), *rest),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any], new_rank: int | None) -> None:
    """Set every generator that the state has and this machine too.

    torch's are seeded anew on a rank that did not exist when it was saved, from what they would
    draw next and its number: it must not repeat what another rank draws.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if new_rank is not None:
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        torch.manual_seed((drawn + new_rank * _STRIDE) % 2**63)
