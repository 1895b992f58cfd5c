"""Whole state dicts: gathered from ranks, read from files, and what they say as a checkpoint.

A full state is ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups":
[{"params": [names], ...}]}}``, as torch's ``get_optimizer_state_dict`` gives it. That function does
not serve here: it steps an optimizer that has no state yet, and takes uneven rows for even ones.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.checkpoint.file_format import file_errors, safetensors
from graphfsdp.checkpoint.manifest import Manifest, SavedTensor
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER, once_each
from graphfsdp.checkpoint.optimizer import optimizer_facts
from graphfsdp.checkpoint.saving import describe_state
from graphfsdp.checkpoint.stages import as_module, joined_facts, names_elsewhere
from graphfsdp.checkpoint.values import Json, decode, encode, tensor_under
from graphfsdp.errors import CheckpointDamagedError, CheckpointError

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule

FullState = dict[str, Any]


def full_state_dict(
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> FullState:
    """Gather a whole state on rank 0, on the CPU; every rank calls it.

    One part is sent after the other, so no rank ever holds more than one beside its shards, but
    rank 0, whose CPU holds all.

    Returns:
        ``{"model": ..., "optimizer": ...}`` on rank 0, where tied tensors are the same object;
        an empty dictionary elsewhere.

    Raises:
        CheckpointError: a unit holds whole weights at the moment.
    """
    members = Members.find(process_group)
    module: nn.Module = as_module(model)
    names_elsewhere(module, members)  # which refuses names that two stages use

    _, sink, facts = members.together(lambda: describe_state(module, optimizer, members))
    facts = joined_facts(module, facts, members)
    tensors = _gather(sink.tensors, members)
    if members.rank:
        return {}
    weights = {key.removeprefix(MODEL): t for key, t in tensors.items() if key.startswith(MODEL)}
    weights |= {alias: weights[first] for alias, first in facts["aliases"].items()}
    state: FullState = {"model": weights}
    saved = facts.get("optimizer")
    if saved is not None:
        state["optimizer"] = {
            **decode(saved["rest"], tensors.__getitem__),
            "kind": saved["kind"],
            "state": {
                name: decode(entries, tensors.__getitem__)
                for name, entries in saved["state"].items()
            },
            "param_groups": [
                {**decode(group["hyper"], tensors.__getitem__), "params": group["params"]}
                for group in saved["groups"]
            ],
        }
    return state


def _gather(tensors: Mapping[str, Tensor], members: Members) -> dict[str, Tensor]:
    """Return whole tensors on rank 0, on the CPU, and nothing elsewhere."""
    found: dict[str, Tensor] = {}
    mine = {key: SavedTensor(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    holders: dict[str, tuple[int, SavedTensor]] = {}
    for rank, saved in enumerate(members.gather(mine)):
        for key, described in saved.items():
            holders.setdefault(key, (rank, described))
    for key, (sender, described) in holders.items():
        tensor: Any = tensors.get(key)
        if is_dtensor(tensor):
            tensor = tensor.full_tensor()
        if members.rank not in (0, sender):
            continue
        if sender > 0:
            act: Callable[[Tensor], object] = functools.partial(
                dist.recv, group=members.group, group_src=sender
            )
            if members.rank > 0:
                act = functools.partial(dist.send, group=members.group, group_dst=0)
            tensor = members.transfer(act, tensor, *described)
        if members.rank == 0:
            found[key] = tensor.detach().to("cpu", copy=True)
    return found


def describe_full(state: Mapping[str, Any]) -> tuple[Manifest, dict[str, Tensor]]:
    """Return what a full state consists of, and its tensors, as if it had been saved."""
    if not isinstance(state.get("model"), Mapping):
        state = {"model": state}
    for name, tensor in state["model"].items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name!r} in the state is a {type(tensor).__name__}, no tensor")
    model, aliases = once_each(state["model"])
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.items()}
    step = state.get("step", 0)
    facts: dict[str, Any] = {"step": step if isinstance(step, int) else 0, "objects": [{}]}
    facts |= {"aliases": aliases, "extra": {}}
    if "optimizer" in state:
        facts["optimizer"] = _describe_optimizer(state["optimizer"], tensors)
    saved = {key: SavedTensor(t.dtype, tuple(t.shape)) for key, t in tensors.items()}
    return Manifest(facts, {}, saved), tensors


def _describe_optimizer(saved: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Json]:
    def keep(where: str, tensor: Tensor) -> str:
        tensors[where] = tensor
        return where

    facts = optimizer_facts(saved, keep)
    for name, entries in saved["state"].items():
        for key, value in entries.items():
            where = f"{OPTIMIZER}{name}.{key}"
            is_state = isinstance(value, Tensor) and key != "step"
            entry = tensor_under(keep(where, value)) if is_state else encode(value, where, keep)
            facts["state"].setdefault(name, {})[key] = entry
    return facts


def read_full_file(path: Path) -> FullState:
    """Read a safetensors file, or a state dict that ``torch.save`` has written.

    Tensors are mapped: what is not looked at is not read. No other pickle than torch's own kind
    of tensors, numbers and collections is read.
    """
    if path.suffix == ".safetensors":
        return {"model": _read_safetensors(path)}
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


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped; tied ones under each of their names."""
    try:
        with safetensors().safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            aliases = file.metadata() or {}
    except file_errors() as error:
        raise CheckpointDamagedError(
            f"{path} is no safetensors file, or was cut off or damaged: {error}"
        ) from error
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}
