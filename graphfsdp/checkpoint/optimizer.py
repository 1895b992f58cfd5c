"""What a checkpoint keeps of an optimizer, by parameter name, and how it is read into one.

States are read in place where they fit; see also Note [Main weights].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part, wrap_like
from graphfsdp.checkpoint.load_plan import MAIN, LoadPlan
from graphfsdp.checkpoint.named import (
    OPTIMIZER,
    NamedModel,
    name_parameters,
    state_part,
    states_by_index,
)
from graphfsdp.checkpoint.objects import TensorSink
from graphfsdp.checkpoint.values import Json, StoreTensor, decode, encode, tensor_under
from graphfsdp.errors import CheckpointError, ConfigError
from graphfsdp.optim.adapters.baked import make_skip_counter, skip_counter
from graphfsdp.optim.fused.adam import FusedAdam

# They have the same states with the same meaning.
_ADAMS = frozenset({"Adam", "AdamW", "FusedAdam"})
# Say how a step is run, not what it computes.
_RUN_SETTINGS = frozenset({"foreach", "capturable", "differentiable", "fused"})
_RULE_SETTINGS = (
    "amsgrad",
    "maximize",
    "bias_correction",
    "decoupled_weight_decay",
    "nesterov",
)


def describe_optimizer(
    model: NamedModel, optimizer: torch.optim.Optimizer, sink: TensorSink
) -> dict[str, Json]:
    state_dict = optimizer.state_dict()
    named = name_parameters(model, optimizer)
    settings = _settings(optimizer)
    groups = [
        {**saved, **settings, "params": [name for name, _ in group]}
        for group, saved in zip(named, state_dict["param_groups"], strict=True)
    ]
    skipped = skip_counter(optimizer)
    if skipped is not None:  # as the optimizers that count themselves have it
        state_dict.setdefault("control", {"skipped_steps": skipped})
    kind = type(optimizer).__name__
    facts = optimizer_facts({**state_dict, "kind": kind, "param_groups": groups}, sink.store)
    for name, param, index in states_by_index(state_dict, named):
        for key, value in state_dict["state"].get(index, {}).items():
            # A step count is a number beside the others, also that of a 0-D parameter.
            is_like = isinstance(value, Tensor) and name in model.tensors and key != "step"
            part = state_part(param, value) if is_like else None
            where = f"{OPTIMIZER}{name}.{key}"
            if part is not None:
                sink.tensors[where] = part
                entry = tensor_under(where)
            elif isinstance(value, Tensor) and is_dtensor(value):
                raise CheckpointError(
                    f"{key!r} of {name!r} in the optimizer's state is sharded and has the shape "
                    f"{tuple(value.shape)}, expected that of the parameter, {tuple(param.shape)}. "
                    "Remedy: an optimizer whose states have their parameter's shape"
                )
            else:
                entry = encode(value, where, sink.store)
            facts["state"].setdefault(name, {})[key] = entry
    return facts


def optimizer_facts(full: Mapping[str, Any], store: StoreTensor) -> dict[str, Json]:
    """Encode all but the states of a state dict that has its kind, and names of parameters."""
    groups = []
    for row, group in enumerate(full["param_groups"]):
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        where = f"{OPTIMIZER}param_groups[{row}]"
        groups.append({"params": list(group["params"]), "hyper": encode(hyper, where, store)})
    rest = {k: v for k, v in full.items() if k not in ("state", "param_groups", "kind")}
    return {
        "kind": full.get("kind", "AdamW"),
        "groups": groups,
        "rest": encode(rest, f"{OPTIMIZER}rest", store),
        "state": {},
    }


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Return what torch's optimizers keep in their groups and ours have once for all of them."""
    if not isinstance(optimizer, FusedAdam):
        return {}
    settings = optimizer.settings
    return {
        "amsgrad": settings.amsgrad,
        "maximize": settings.flags.maximize,
        "bias_correction": settings.flags.bias_correction,
        "decoupled_weight_decay": settings.flags.adam_w_mode,
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
    named = name_parameters(plan.model, optimizer)
    state: dict[Any, Any] = {}
    num_problems = len(plan.problems)
    groups = [
        _plan_group(plan, saved, group, here, optimizer)
        for group, here in zip(named, current["param_groups"], strict=True)
    ]
    for name, param, index in states_by_index(current, named):
        read = _read_state(plan, name, param, current["state"].get(index, {}), optimizer)
        if read:
            state[index] = read
    trained = {name for group in named for name, _ in group}
    for name in saved["state"]:
        if name not in trained and name not in plan.elsewhere:
            plan.problems.append(
                f"optimizer: the checkpoint has a state of {name!r}, which this one does not train"
            )
    rest = decode(saved["rest"], plan.read_whole)
    known = {key: value for key, value in rest.items() if key in current}
    state_dict = {**current, "state": state, "param_groups": groups, **known}
    if len(plan.problems) == num_problems and isinstance(optimizer, FusedAdam):
        try:
            optimizer.match(state_dict)
        except ConfigError as error:
            plan.problems.append(f"optimizer: {error}")
            return
    plan.afterwards.append(lambda: _load_in_place(optimizer, state_dict))
    if "control" in rest and "control" not in current:
        skipped = rest["control"]["skipped_steps"]
        plan.afterwards.append(lambda: make_skip_counter(optimizer).copy_(skipped))


def _plan_group(
    plan: LoadPlan,
    saved: Mapping[str, Json],
    group: Sequence[tuple[str, Tensor]],
    here: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    row_of = {name: row for row, g in enumerate(saved["groups"]) for name in g["params"]}
    rows: dict[int, str] = {}
    for name, _ in group:
        if name in row_of:
            rows.setdefault(row_of[name], name)
        else:
            plan.problems.append(
                f"optimizer: {name!r} is in no parameter group of the saved optimizer"
            )
    hypers = {row: decode(saved["groups"][row]["hyper"], _no_tensor) for row in rows}
    for row, name in list(rows.items())[1:]:
        first_row, first_name = next(iter(rows.items()))
        if hypers[row] != hypers[first_row]:
            plan.problems.append(
                f"optimizer: {first_name!r} and {name!r} are in one parameter group here, but "
                f"were saved in groups {first_row} and {row} with other hyper-parameters"
            )
    if not rows:
        return dict(here)
    chosen = next(iter(hypers.values()))
    compares = isinstance(optimizer, FusedAdam)  # its state_dict does, with better words
    for setting in _RULE_SETTINGS if not compares else ():
        default = setting == "bias_correction"
        if setting in chosen and chosen[setting] != here.get(setting, default):
            plan.problems.append(
                f"optimizer: saved with {setting}={chosen[setting]}, here "
                f"{here.get(setting, default)}"
            )
    known = {key: value for key, value in chosen.items() if key not in _RUN_SETTINGS}
    if not compares:
        known = {k: v for k, v in known.items() if k in here or k not in _RULE_SETTINGS}
    return {**here, **known}


def _read_state(
    plan: LoadPlan,
    name: str,
    param: Tensor,
    here: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return a parameter's state, its tensors yet to be filled; empty if none was saved.

    ``here`` is what the optimizer has of it, by key.
    """
    saved = plan.manifest.facts["optimizer"]["state"].get(name, {})
    dtypes: Mapping[str, Any] = here
    if isinstance(optimizer, FusedAdam):
        dtypes = optimizer.settings.state_dtypes(param)
    found: dict[str, Any] = {}
    for key, encoded in saved.items():
        if key == MAIN and MAIN not in dtypes:
            continue
        stored = encoded.get("key") if isinstance(encoded, dict) else None
        if stored != f"{OPTIMIZER}{name}.{key}" or name not in plan.model.tensors:
            found[key] = decode(encoded, plan.read_whole)
        elif plan.fits(stored, param.shape, f"optimizer: {key} of {name!r}"):
            found[key] = _read_tensor(plan, name, param, stored, here.get(key))
    if MAIN in dtypes and MAIN not in saved:
        main = _read_main(plan, name, param)
        if main is not None:
            found[MAIN] = main
            if not saved and isinstance(optimizer, FusedAdam):
                # Never stepped: only a state of zeros can hold a main weight that was saved wider.
                found["step"] = torch.zeros((), device="cpu")
                found |= {key: _new(param, torch.float32).zero_() for key in dtypes if key != MAIN}
    return found


def _read_tensor(plan: LoadPlan, name: str, param: Tensor, key: str, existing: object) -> Tensor:
    """Plan to read into the existing state where it has the right dtype, else into a new tensor."""
    dtype = plan.manifest.tensors[key].dtype
    if isinstance(existing, Tensor) and existing.dtype == dtype:
        part = state_part(param, existing)
        if part is not None:
            plan.parts.append((key, part))
            return existing
    weight_key = plan.saved_key(name)
    if key.endswith(f".{MAIN}") and weight_key is not None:
        made = _new(param, torch.float32)
        plan.read_main(weight_key, key, made)
    else:
        made = _new(param, dtype)
        plan.parts.append((key, made))
    return made


def _read_main(plan: LoadPlan, name: str, param: Tensor) -> Tensor | None:
    """Plan to read the main weight from the model's, if that was saved wider."""
    key = plan.saved_key(name)
    if key is None or name in plan.unread:
        return None
    if plan.manifest.tensors[key].dtype.itemsize <= param.dtype.itemsize:
        return None
    main = _new(param, torch.float32)
    plan.parts.append((key, main))
    return main


def _new(param: Tensor, dtype: torch.dtype) -> Tensor:
    return wrap_like(torch.empty_like(local_part(param.detach()), dtype=dtype), param)


def _no_tensor(key: str) -> Tensor:
    raise KeyError(key)


def _load_in_place(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state into the tensors that exist, so that a captured step goes on with it.

    torch's optimizers put new tensors into their state and their groups. Where one existed with
    the same shape, dtype and device, its values are replaced instead; numbers of groups come from
    a file, on the CPU, and torch leaves them there.
    """
    states = {param: dict(entries) for param, entries in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    with torch.no_grad():
        for param, entries in optimizer.state.items():
            if isinstance(entries, dict):
                _keep(entries, states.get(param, {}))
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _keep(group, before)


def _keep(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key, old in before.items():
        new = now.get(key)
        if not isinstance(old, Tensor) or new is None or new is old:
            continue
        if not isinstance(new, Tensor):
            new = torch.as_tensor(new, dtype=old.dtype, device=old.device)
        kinds = [(t.shape, t.dtype, local_part(t).shape) for t in (new, old)]
        if kinds[0] == kinds[1] and new.device in (old.device, torch.device("cpu")):
            local_part(old).copy_(local_part(new))
            now[key] = old
