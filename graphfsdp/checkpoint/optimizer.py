"""What a checkpoint keeps of an optimizer, by parameter name, and how it is read into one.

States are read in place where they fit; see also Note [Main weights].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.checkpoint.load_plan import MAIN, LoadPlan, new_like
from graphfsdp.checkpoint.named import OPTIMIZER, NamedModel, state_part, states_by_name
from graphfsdp.checkpoint.objects import Snapshot
from graphfsdp.checkpoint.values import Json, decode, encode, tensor_under
from graphfsdp.errors import CheckpointError, ConfigError
from graphfsdp.optim.adapters.baked import make_skip_counter, skip_counter
from graphfsdp.optim.fused.adam import FusedAdam

# They have the same states with the same meaning.
_ADAMS = frozenset({"Adam", "AdamW", "FusedAdam"})
# Say how a step is run, not what it computes.
_RUN_SETTINGS = frozenset({"foreach", "capturable", "differentiable", "fused"})
_RULE_SETTINGS = frozenset(
    {"amsgrad", "maximize", "bias_correction", "decoupled_weight_decay", "nesterov"}
)
_NO_NUMBERS = frozenset({"params", "param_names"})


def describe_optimizer(
    model: NamedModel, optimizer: torch.optim.Optimizer, snapshot: Snapshot
) -> dict[str, Json]:
    state_dict = optimizer.state_dict()
    skipped = skip_counter(optimizer)
    if skipped is not None:  # as the optimizers that count themselves have it
        state_dict.setdefault("control", {"skipped_steps": skipped})
    # What torch's optimizers keep in their groups.
    settings = optimizer.settings.in_groups() if isinstance(optimizer, FusedAdam) else {}
    groups: list[dict[str, Any]] = []
    for row, group in enumerate(state_dict["param_groups"]):
        hyper = {key: value for key, value in group.items() if key not in _NO_NUMBERS} | settings
        where = f"{OPTIMIZER}param_groups[{row}]"
        groups.append({"params": [], "hyper": encode(hyper, where, snapshot.store)})
    state: dict[str, Json] = {}
    common = dict(state_dict["state"])  # what is left of it belongs to no parameter
    for row, name, param, index in states_by_name(model, optimizer, state_dict):
        groups[row]["params"].append(name)
        common.pop(index, None)
        for key, value in state_dict["state"].get(index, {}).items():
            # A step count is a number beside the others, also that of a 0-D parameter.
            is_like = name in model.tensors and key != "step"
            part = state_part(param, value) if is_like else None
            where = f"{OPTIMIZER}{name}.{key}"
            if part is not None:
                snapshot.tensors[where] = part
                entry = tensor_under(where)
            elif isinstance(value, Tensor) and is_dtensor(value):
                raise CheckpointError(
                    f"{key!r} of {name!r} in the optimizer's state is sharded and has the shape "
                    f"{tuple(value.shape)}, expected that of the parameter, {tuple(param.shape)}. "
                    "Remedy: an optimizer whose states have their parameter's shape"
                )
            else:
                entry = encode(value, where, snapshot.store)
            state.setdefault(name, {})[key] = entry
    rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    return {
        "kind": type(optimizer).__name__,
        "groups": groups,
        "rest": encode(rest, f"{OPTIMIZER}rest", snapshot.store),
        "common": encode(common, f"{OPTIMIZER}common", snapshot.store),
        "state": state,
    }


def plan_optimizer(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> None:
    saved = plan.manifest.facts.get("optimizer")
    if saved is None:
        plan.problems.append("optimizer: the checkpoint was saved without one")
        return
    kind = type(optimizer).__name__
    if kind != saved["kind"] and not {kind, saved["kind"]} <= _ADAMS:
        plan.problems.append(f"optimizer: saved from {saved['kind']}, here a {kind}")
        return
    current = optimizer.state_dict()
    row_of = {name: row for row, group in enumerate(saved["groups"]) for name in group["params"]}
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    state: dict[Any, Any] = {}
    common = dict(current["state"])  # what is left of it belongs to no parameter
    as_saved: dict[Tensor, dict[str, Any]] = {}
    for row, name, param, index in states_by_name(plan.model, optimizer, current):
        names[row].append(name)
        common.pop(index, None)
        read = current["state"].get(index, {})
        if name in row_of:
            read = _read_state(plan, saved["state"].get(name, {}), name, param, read, optimizer)
        else:
            plan.problems.append(
                f"optimizer: {name!r} is in no parameter group of the saved optimizer"
            )
        if read:
            state[index] = read
        if kind == saved["kind"] and plan.has_its_dtype(name, param):
            as_saved[param] = read
    plan.unused += [
        f"optimizer: the checkpoint has a state of {name!r}, which this one does not train"
        for name in saved["state"].keys() - set().union(*names)
    ]
    groups = []
    for here, its_names in zip(current["param_groups"], names, strict=True):
        rows: dict[int, str] = {}
        for name in its_names:
            if name in row_of:
                rows.setdefault(row_of[name], name)
        numbers = _read_numbers(plan, saved["groups"], rows) if rows else {}
        if not isinstance(optimizer, FusedAdam):  # which compares below, with better words
            numbers = _compare_rules(plan, numbers, here)
        groups.append({**here, **numbers})
    state |= decode(saved["common"], plan.read) if "common" in saved else common
    rest = decode(saved["rest"], plan.read)
    more = {key: value for key, value in rest.items() if key in current}
    state_dict = {**current, "state": state, "param_groups": groups, **more}
    if isinstance(optimizer, FusedAdam):
        try:
            optimizer.match(state_dict)
        except ConfigError as error:
            plan.problems.append(f"optimizer: {error}")
            return
    plan.afterwards.append(lambda: _load_in_place(optimizer, state_dict, as_saved))
    if "control" in rest and "control" not in current:
        skipped = rest["control"]["skipped_steps"]
        plan.afterwards.append(lambda: make_skip_counter(optimizer).copy_(skipped))


def _read_numbers(
    plan: LoadPlan, saved: Sequence[Mapping[str, Json]], rows: Mapping[int, str]
) -> dict[str, Any]:
    """Return the numbers of saved groups, which must be equal; ``rows`` has a parameter of each."""
    (first_row, first_name), *others = rows.items()
    for row, name in others:
        if saved[row]["hyper"] != saved[first_row]["hyper"]:
            plan.problems.append(
                f"optimizer: {first_name!r} and {name!r} are in one parameter group here, but "
                f"were saved in groups {first_row} and {row} with other hyper-parameters"
            )
    hyper = decode(saved[first_row]["hyper"], plan.read)
    return {key: value for key, value in hyper.items() if key not in _RUN_SETTINGS}


def _compare_rules(
    plan: LoadPlan, numbers: Mapping[str, Any], here: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the numbers without settings that the group has none of; those must be the usual."""
    for key in sorted(_RULE_SETTINGS & numbers.keys()):
        mine = here.get(key, key == "bias_correction")
        if numbers[key] != mine:
            plan.problems.append(f"optimizer: saved with {key}={numbers[key]}, here {mine}")
    foreign = _RULE_SETTINGS - here.keys()
    return {key: value for key, value in numbers.items() if key not in foreign}


def _read_state(
    plan: LoadPlan,
    saved: Mapping[str, Json],
    name: str,
    param: Tensor,
    here: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> Mapping[str, Any]:
    """Return a parameter's state, its tensors yet to be filled; empty if none was saved.

    ``here`` is what the optimizer has of it, by key; it stays if what was saved does not fit.
    """
    wanted: Mapping[str, Any] = here
    if isinstance(optimizer, FusedAdam):
        wanted = optimizer.settings.state_dtypes(param)
    keys = [key for key in saved if key != MAIN or MAIN in wanted]
    stored = {
        key: where
        for key in keys
        if saved[key] == tensor_under(where := f"{OPTIMIZER}{name}.{key}")
    }
    fit = [
        plan.fits(where, param.shape, f"optimizer: {key} of {name!r}")
        for key, where in stored.items()
    ]
    if not all(fit):
        return here
    found: dict[str, Any] = {}
    for key in keys:
        if key in stored:
            found[key] = plan.read_like(stored[key], param, here.get(key))
        else:
            found[key] = decode(saved[key], plan.read)
    weight = None if name in plan.unread else plan.saved_key(name)
    if weight is None or plan.width(weight) <= param.dtype.itemsize:
        return found
    if MAIN not in wanted or MAIN in saved:
        return found
    found[MAIN] = plan.read_like(weight, param)
    if not saved and isinstance(optimizer, FusedAdam):
        # Never stepped: only a state of zeros can hold a main weight that was saved wider.
        found["step"] = torch.zeros((), device="cpu")
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
