"""Whole state dicts in and out of sharded models: on rank 0 alone, one tensor at a time.

A full state is ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups":
[{"params": [names], ...}]}}``, as torch's ``get_optimizer_state_dict`` gives it. That function does
not serve here: it steps an optimizer that has no state yet, and takes uneven rows for even ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.checkpoint.load_plan import LoadPlan, plan_model
from graphfsdp.checkpoint.manifest import Manifest, SavedTensor
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import (
    MODEL,
    OPTIMIZER,
    NamedModel,
    name_model,
    name_parameters,
    states_by_index,
)
from graphfsdp.checkpoint.optimizer import plan_optimizer
from graphfsdp.checkpoint.parts import Part
from graphfsdp.checkpoint.safetensors_file import read_state
from graphfsdp.checkpoint.values import encode
from graphfsdp.errors import CheckpointError
from graphfsdp.optim.adapters.baked import skip_counter
from graphfsdp.sharding.materialize.materialize import memory_for_values

FullState = dict[str, Any]


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> FullState:
    """Gather a whole state on rank 0, on the CPU; every rank calls it.

    One tensor is gathered after the other, so no rank ever holds more than one beside its shards,
    but rank 0, whose CPU holds all.

    Returns:
        ``{"model": ..., "optimizer": ...}`` on rank 0, where tied tensors are the same object;
        an empty dictionary elsewhere.

    Raises:
        CheckpointError: a unit holds whole weights at the moment.
    """
    members = Members.find(process_group)
    named = members.together(lambda: name_model(model))
    found: dict[str, Tensor] = {}
    for name, tensor in named.tensors.items():
        found[name] = _gather(named.part(tensor, tensor), tensor, members)
    state: FullState = {"model": found}
    found |= {alias: found[first] for alias, first in named.aliases.items()}
    if optimizer is not None:
        state["optimizer"] = _gather_optimizer(named, optimizer, members)
    return state if members.rank == 0 else {}


def _gather_optimizer(
    named: NamedModel, optimizer: torch.optim.Optimizer, members: Members
) -> dict[str, Any]:
    saved = optimizer.state_dict()
    parameters = name_parameters(named, optimizer)
    states: dict[str, dict[str, Any]] = {}
    for name, param, index in states_by_index(saved, parameters):
        for key, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor) and name in named.tensors and key != "step":
                value = _gather(named.part(param, value), value, members)
            elif isinstance(value, Tensor):
                value = value.detach().cpu().clone()
            states.setdefault(name, {})[key] = value
    groups = [
        {**group, "params": [name for name, _ in names]}
        for group, names in zip(saved["param_groups"], parameters, strict=True)
    ]
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    skipped = skip_counter(optimizer)
    if skipped is not None:
        rest.setdefault("control", {"skipped_steps": skipped})
    copied = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), rest)
    return {**copied, "state": states, "param_groups": groups, "kind": type(optimizer).__name__}


def _gather(part: Part, tensor: Tensor, members: Members) -> Tensor:
    """Return a whole tensor on rank 0, and an empty one elsewhere."""
    keep = members.rank == 0
    if is_dtensor(tensor):
        dtensor: Any = tensor
        with torch.no_grad():  # no detach(): see recut.py
            whole: Tensor = dtensor.full_tensor()
        return whole.cpu() if keep else whole.new_empty(0)
    if part.local.shape == part.whole_shape:
        return tensor.detach().cpu().clone() if keep else tensor.new_empty(0)
    # A plain tensor beside a DTensor parameter: this rank's rows.
    pieces = members.gather((part.offsets[0], part.local.cpu()))
    rows = [local for _, local in sorted(pieces, key=lambda piece: piece[0])]
    return torch.cat(rows) if keep else tensor.new_empty(0)


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[str, ...]:
    """Load a whole state that rank 0 has, in place; every rank calls it.

    One tensor is sent after the other, and each rank keeps its rows of it.

    Args:
        model: Sharded or not.
        state: As ``full_state_dict`` returns it, or only the dictionary of the model's tensors;
            read on rank 0.
        optimizer: Its state too, which ``state`` must have then.
        strict: Refuse a state that does not fit in everything.
        process_group: Ranks that load together; None is all.

    Returns:
        What did not fit and was left as it was.

    Raises:
        CheckpointMismatchError: it does not fit; the whole difference is listed.
    """
    members = Members.find(process_group)
    tensors: dict[str, Tensor] = {}

    def describe() -> Manifest:
        manifest, found = describe_full(state or {})
        tensors.update(found)
        return manifest

    manifest = members.first(describe)

    def make_plan() -> LoadPlan:
        plan = LoadPlan(manifest, name_model(model))
        plan_model(plan)
        if optimizer is not None:
            plan_optimizer(plan, optimizer)
        if strict:
            plan.refuse_problems("state", "the model that it was taken from")
        return plan

    with memory_for_values(model) as have_values:
        plan = members.together(make_plan)
        with torch.no_grad():
            _distribute(plan, tensors, members)
        plan.act()
        have_values(plan.filled())
    return tuple(plan.problems)


def describe_full(state: Mapping[str, Any]) -> tuple[Manifest, dict[str, Tensor]]:
    """Return what a full state consists of, and its tensors, as if it had been saved."""
    if not isinstance(state.get("model"), Mapping):
        state = {"model": state}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in state["model"].items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name!r} in the state is a {type(tensor).__name__}, no tensor")
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[f"{MODEL}{name}"] = tensor
        else:
            aliases[name] = first
    step = state.get("step", 0)
    facts: dict[str, Any] = {"step": step if isinstance(step, int) else 0, "objects": [{}]}
    facts |= {"aliases": aliases, "extra": {}}
    if "optimizer" in state:
        facts["optimizer"] = _describe_optimizer(state["optimizer"], tensors)
    saved = {
        key: SavedTensor(tensor.dtype, tuple(tensor.shape), ()) for key, tensor in tensors.items()
    }
    return Manifest(facts, {}, saved), tensors


def _describe_optimizer(saved: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    def keep(where: str, tensor: Tensor) -> str:
        tensors[where] = tensor
        return where

    states: dict[str, Any] = {}
    for name, entries in saved["state"].items():
        for key, value in entries.items():
            where = f"{OPTIMIZER}{name}/{key}"
            is_state = isinstance(value, Tensor) and key != "step"
            states.setdefault(name, {})[key] = (
                {"!": "tensor", "key": keep(where, value)}
                if is_state
                else encode(value, where, keep)
            )
    groups = []
    for row, group in enumerate(saved["param_groups"]):
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        where = f"{OPTIMIZER}param_groups[{row}]"
        groups.append({"params": list(group["params"]), "hyper": encode(hyper, where, keep)})
    rest = {k: v for k, v in saved.items() if k not in ("state", "param_groups", "kind")}
    return {
        "kind": saved.get("kind", "AdamW"),
        "groups": groups,
        "rest": encode(rest, f"{OPTIMIZER}rest", keep),
        "state": states,
    }


def _distribute(plan: LoadPlan, tensors: Mapping[str, Tensor], members: Members) -> None:
    wanted: dict[str, list[Part]] = {}
    for key, part in plan.parts:
        wanted.setdefault(key, []).append(part)
    keys = dict.fromkeys(key for mine in members.gather(list(wanted)) for key in mine)
    for key in keys:
        saved = plan.manifest.tensors[key]
        if members.group is None:
            tensor = tensors[key]
        else:
            on_gpu = dist.get_backend(members.group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
            tensor = torch.empty(saved.shape, dtype=saved.dtype, device=device)
            if members.rank == 0:
                tensor.copy_(tensors[key])
            if tensor.numel():
                # As bytes: not every backend knows every dtype.
                raw = tensor.reshape(-1).view(torch.uint8)
                dist.broadcast(raw, group=members.group, group_src=0)
        for part in wanted.get(key, ()):
            ranges = zip(part.offsets, part.local.shape, strict=True)
            part.local.copy_(tensor[tuple(slice(first, first + n) for first, n in ranges)])


def read_full_file(path: Path) -> FullState:
    """Read a safetensors file, or a state dict that ``torch.save`` has written.

    Tensors are mapped: what is not looked at is not read. No other pickle than torch's own kind
    of tensors, numbers and collections is read.
    """
    if path.suffix == ".safetensors":
        return {"model": read_state(path)}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Whatever torch raises for a file that is none of its own; there are many kinds.
        raise CheckpointError(
            f"{path} cannot be read as a state dict of torch.save, and its name does not end in "
            f".safetensors: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected a state dict")
    return state
