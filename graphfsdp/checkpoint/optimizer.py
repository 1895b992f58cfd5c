"""What a checkpoint keeps of an optimizer, by parameter name, and how it is read into one.

States are read in place where they fit; see also Note [Main weights].
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.checkpoint.load_plan import MAIN, LoadPlan, new_like
from graphfsdp.checkpoint.named import MODEL, OPTIMIZER, NamedModel, state_part
from graphfsdp.checkpoint.snapshot import Snapshot
from graphfsdp.checkpoint.values import Json, decode, encode
from graphfsdp.errors import CheckpointError, ConfigError
from graphfsdp.optim.adapters.baked import make_skip_counter, skip_counter
from graphfsdp.optim.fused.adam import FusedAdam

# Say how a step is run, not what it computes.
_RUN_SETTINGS = frozenset({"foreach", "capturable", "differentiable", "fused"})
_NO_NUMBERS = frozenset({"params", "param_names"})
_STEP = "step"  # a number beside the others, also that of a 0-D parameter


def describe_optimizer(
    model: NamedModel, optimizer: torch.optim.Optimizer, snapshot: Snapshot
) -> dict[str, Json]:
    state_dict = optimizer.state_dict()
    skipped = skip_counter(optimizer)
    if skipped is not None:  # as the optimizers that count themselves have it
        state_dict.setdefault("control", {"skipped_steps": skipped})
    # What torch's optimizers keep in their groups.
    settings = optimizer.settings.in_groups() if isinstance(optimizer, FusedAdam) else {}
    groups: list[Json] = []
    for row, group in enumerate(state_dict["param_groups"]):
        numbers = {key: value for key, value in group.items() if key not in _NO_NUMBERS} | settings
        groups.append(encode(numbers, f"optimizer.param_groups[{row}]", snapshot.keep_plain))
    hyper: dict[str, Json] = {}
    state: dict[str, dict[str, Json]] = {}
    common = dict(state_dict["state"])  # what is left of it belongs to no parameter
    for row, name, param, index in _params_by_name(model, optimizer, state_dict):
        hyper[name] = groups[row]
        store = partial(_store_state, snapshot, param)
        state[name] = {
            key: encode(value, f"{OPTIMIZER}{name}.{key}", store)
            for key, value in common.pop(index, {}).items()
        }
    if common:
        raise CheckpointError(
            f"{sorted(map(str, common))} in the optimizer's state belong to no parameter. Remedy: "
            "keep them in an object of their own (objects={...})"
        )
    rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    return {
        "kind": type(optimizer).__name__,
        "hyper": hyper,
        "state": state,
        "rest": encode(rest, "optimizer", snapshot.keep_plain),
    }


def _params_by_name(
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


def _store_state(snapshot: Snapshot, param: Tensor, where: str, value: Tensor) -> str:
    part = None if where.endswith(f".{_STEP}") else state_part(param, value)
    # Of a plain tensor beside a sharded parameter each rank may have another one.
    if part is None and (is_dtensor(value) or (is_dtensor(param) and value.numel() > 1)):
        raise CheckpointError(
            f"{where} has the shape {tuple(value.shape)} and belongs to a sharded parameter of the "
            f"shape {tuple(param.shape)}. Remedy: an optimizer whose states have their parameter's "
            "shape"
        )
    return snapshot.keep(where, value if part is None else part)


def plan_optimizer(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> None:
    saved = plan.facts.get("optimizer")
    if saved is None:
        plan.problems.append("optimizer: the checkpoint was saved without one")
        return
    kind = type(optimizer).__name__
    if kind != saved["kind"]:
        plan.problems.append(f"optimizer: saved from {saved['kind']}, here a {kind}")
        return
    current = optimizer.state_dict()
    hypers: list[list[Json]] = [[] for _ in optimizer.param_groups]
    state: dict[Any, Any] = {}
    as_saved: dict[Tensor, dict[str, Any]] = {}
    names: set[str] = set()
    for row, name, param, index in _params_by_name(plan.model, optimizer, current):
        names.add(name)
        if name not in saved["hyper"]:
            plan.problems.append(f"optimizer: {name!r} was not trained by the saved optimizer")
            continue
        hypers[row].append(saved["hyper"][name])
        here = current["state"].get(index, {})
        read = _read_state(plan, saved["state"][name], name, param, here, optimizer)
        if read:
            state[index] = read
        weight = plan.saved.get(f"{MODEL}{name}")
        if weight is not None and weight.dtype == param.dtype:
            as_saved[param] = read
    plan.unused += [
        f"optimizer: the checkpoint has a state of {name!r}, which this one does not train"
        for name, its_state in saved["state"].items()
        if its_state and name not in names
    ]
    groups = []
    for row, (group, found) in enumerate(zip(current["param_groups"], hypers, strict=True)):
        if any(each != found[0] for each in found):
            plan.problems.append(
                f"optimizer: parameters of group {row} were saved with hyper-parameters that are "
                "not the same"
            )
        numbers = decode(found[0], plan.read) if found else {}
        numbers = {key: value for key, value in numbers.items() if key not in _RUN_SETTINGS}
        groups.append({**group, **numbers})
    rest = decode(saved["rest"], plan.read)
    more = {key: value for key, value in rest.items() if key in current}
    state_dict = {**current, "state": state, "param_groups": groups, **more}
    if isinstance(optimizer, FusedAdam):
        try:
            optimizer.match(state_dict)
        except ConfigError as error:
            plan.problems.append(f"optimizer: {error}")
    plan.afterwards.append(lambda: _load_in_place(optimizer, state_dict, as_saved))
    if "control" in rest and "control" not in current:
        skipped = rest["control"]["skipped_steps"]
        plan.afterwards.append(lambda: make_skip_counter(optimizer).copy_(skipped))


def _read_state(
    plan: LoadPlan,
    saved: Mapping[str, Json],
    name: str,
    param: Tensor,
    here: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return a parameter's state, its tensors yet to be filled; empty if none was saved.

    ``here`` is what the optimizer has of it, by key.
    """
    wanted: Mapping[str, Any] = here
    if isinstance(optimizer, FusedAdam):
        wanted = optimizer.settings.state_dtypes(param)

    def find(where: str) -> Tensor:
        key = where.removeprefix(f"{OPTIMIZER}{name}.")
        is_like = key != _STEP and plan.saved[where].shape == tuple(param.shape)
        return plan.read_like(where, param, here.get(key)) if is_like else plan.read(where)

    found: dict[str, Any] = {
        key: decode(value, find) for key, value in saved.items() if key != MAIN or MAIN in wanted
    }
    weight = plan.saved.get(f"{MODEL}{name}")
    if weight is None or weight.dtype.itemsize <= param.dtype.itemsize:
        return found
    if MAIN not in wanted or MAIN in saved:
        return found
    found[MAIN] = plan.read_like(f"{MODEL}{name}", param)
    if not saved and isinstance(optimizer, FusedAdam):
        # Never stepped: only a state of zeros can hold a main weight that was saved wider.
        found[_STEP] = torch.zeros((), device="cpu")
        found |= {key: new_like(param, torch.float32).zero_() for key in wanted if key != MAIN}
    return found


def _load_in_place(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    as_saved: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Load a state into the tensors that exist, so that a captured step goes on with it.

    torch's optimizers put new tensors into their state and their groups. Where one existed with
    the same shape, dtype and device, its values are replaced instead; numbers of groups come from
    a file, on the CPU, and torch leaves them there. It also casts states to the dtype of their
    parameter, which would round wider ones: of the parameters in ``as_saved`` they keep their own.
    """

    def places() -> dict[Any, dict[str, Any]]:
        """Return what each parameter and each group has."""
        states = {param: own for param, own in optimizer.state.items() if isinstance(own, dict)}
        return {**states, **dict(enumerate(optimizer.param_groups))}

    before = {place: dict(entries) for place, entries in places().items()}
    optimizer.load_state_dict(state_dict)
    has_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    for param, saved in as_saved.items() if has_torchs else ():
        for key, value in saved.items():
            cast = optimizer.state[param].get(key)
            if isinstance(cast, Tensor) and cast.dtype != value.dtype:
                optimizer.state[param][key] = value.to(cast.device)
    for place, entries in places().items():
        for key, old in before.get(place, {}).items():
            new = entries.get(key)
            if not isinstance(old, Tensor) or new is None or new is old:
                continue
            if not isinstance(new, Tensor):
                new = torch.as_tensor(new, dtype=old.dtype, device=old.device)
            kinds = [(t.shape, t.dtype, local_part(t).shape) for t in (new, old)]
            if kinds[0] == kinds[1] and new.device in (old.device, torch.device("cpu")):
                local_part(old).copy_(local_part(new))
                entries[key] = old
