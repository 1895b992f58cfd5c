"""What a checkpoint keeps of an optimizer, by parameter name, and how it is read into one.

States are read in place where they fit; see also Note [Main weights].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like, wrap_rows_like
from graphfsdp.checkpoint.load_plan import MAIN, LoadPlan
from graphfsdp.checkpoint.named import (
    OPTIMIZER,
    NamedModel,
    NamedPart,
    name_parameters,
    state_part,
    states_by_index,
)
from graphfsdp.checkpoint.values import Json, StoreTensor, decode, encode, tensor_under
from graphfsdp.errors import ConfigError
from graphfsdp.optim.adapters.baked import make_skip_counter, skip_counter
from graphfsdp.optim.fused.adam import FusedAdam

# They have the same states with the same meaning.
_ADAMS = frozenset({"Adam", "AdamW", "FusedAdam"})
# Adafactor's, which have not the parameter's shape.
_FACTORS = frozenset({"row_var", "col_var"})
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
    model: NamedModel, optimizer: torch.optim.Optimizer, store: StoreTensor
) -> tuple[dict[str, Json], list[NamedPart]]:
    """``store`` keeps large tensors that belong to no parameter."""
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
    facts = optimizer_facts({**state_dict, "kind": kind, "param_groups": groups}, store)
    parts: list[NamedPart] = []
    for name, param, index in states_by_index(state_dict, named):
        for key, value in state_dict["state"].get(index, {}).items():
            # A step count is a number beside the others, also that of a 0-D parameter.
            is_like = isinstance(value, Tensor) and name in model.tensors and key != "step"
            part = state_part(param, value) if is_like else None
            where = f"{OPTIMIZER}{name}/{key}"
            if part is not None and part.whole_shape[:1] == tuple(param.shape[:1]):
                parts.append((where, part))
                entry = tensor_under(where)
            else:
                entry = encode(value, where, store)
            facts["state"].setdefault(name, {})[key] = entry
    return facts, parts


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
        entries = current["state"].get(index, {})
        states = saved["state"].get(name, {})
        read = _StateReader(plan, states, name, param, entries, optimizer).read()
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


@dataclass
class _StateReader:
    """Reads one parameter's state; ``_entries`` are what the optimizer has of it, by key."""

    _plan: LoadPlan
    _saved: Mapping[str, Json]
    _name: str
    _param: Tensor
    _entries: Mapping[str, Any]
    _optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        dtypes: Mapping[str, Any] = self._entries
        if isinstance(self._optimizer, FusedAdam):
            dtypes = self._optimizer.settings.state_dtypes(self._param)
        self._wants_main = MAIN in dtypes
        self._main_is_16_bits = dtypes.get(MAIN) is torch.int16
        self._in_model = self._name in self._plan.model.tensors

    def read(self) -> dict[str, Any]:
        """Return the state, its tensors yet to be filled; empty if none was saved."""
        if not self._saved:
            return self._never_stepped()
        found: dict[str, Any] = {}
        for key in self._saved:
            if key != MAIN:
                self._read_entry(key, found)
        if self._wants_main:
            self._read_main(found)
        return found

    def _never_stepped(self) -> dict[str, Any]:
        """Return a state of zeros if only that can hold a main weight that was saved wider."""
        if not (isinstance(self._optimizer, FusedAdam) and self._wants_main):
            return {}
        found: dict[str, Any] = {}
        self._read_main(found)
        if found:
            found["step"] = torch.zeros((), device="cpu")
            for key in self._optimizer.settings.state_dtypes(self._param):
                found.setdefault(key, self._new(torch.float32).zero_())
        return found

    def _read_entry(self, key: str, found: dict[str, Any]) -> None:
        encoded = self._saved[key]
        if not (isinstance(encoded, dict) and "key" in encoded):
            found[key] = decode(encoded, _no_tensor)
        elif not self._in_model or self._is_of_no_row(key, encoded["key"]):
            found[key] = self._plan.read_whole(encoded["key"])
        else:
            self._read_tensor(key, encoded["key"], found)

    def _is_of_no_row(self, key: str, saved_key: str) -> bool:
        """Return whether a state belongs to all rows of its parameter."""
        saved = self._plan.manifest.tensors[saved_key]
        return key in _FACTORS and saved.shape[:1] != tuple(self._param.shape[:1])

    def _read_tensor(self, key: str, saved_key: str, found: dict[str, Any]) -> None:
        saved = self._plan.manifest.tensors[saved_key]
        shape = self._shape(key, saved.shape)
        if self._plan.fits(saved_key, shape, f"optimizer: {key} of {self._name!r}"):
            found[key] = self._target(key, saved.dtype, shape)
            self._fill(found[key], saved_key)

    def _fill(self, target: Tensor, saved_key: str) -> None:
        self._plan.parts.append((saved_key, state_part(self._param, target)))

    def _shape(self, key: str, saved: tuple[int, ...]) -> tuple[int, ...]:
        existing = self._entries.get(key)
        if isinstance(existing, Tensor):
            return state_part(self._param, existing).whole_shape
        if key.endswith("scale") or key in _FACTORS:  # rows of their own length
            return (*self._param.shape[:1], *saved[1:])
        return tuple(self._param.shape)

    def _target(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the existing state where it has the right dtype and shape, else a new tensor."""
        existing = self._entries.get(key)
        if isinstance(existing, Tensor) and existing.dtype == dtype and existing.shape == shape:
            return existing
        if shape == tuple(self._param.shape):
            return self._new(dtype)
        local = local_part(self._param)
        rows = local.new_empty((*local.shape[:1], *shape[1:]), dtype=dtype)
        return wrap_rows_like(rows, self._param)

    def _new(self, dtype: torch.dtype) -> Tensor:
        local = local_part(self._param.detach())
        return wrap_like(torch.empty_like(local, dtype=dtype), self._param)

    def _read_main(self, found: dict[str, Any]) -> None:
        """Read the main weight, whatever form it was saved in; see Note [Main weights]."""
        weight_key = self._plan.saved_key(self._name)
        saved_dtype = None if weight_key is None else self._plan.manifest.tensors[weight_key].dtype
        encoded = self._saved.get(MAIN)
        if encoded is not None:
            remainder = self._plan.manifest.tensors[encoded["key"]].dtype == torch.int16
            same = self._main_is_16_bits and saved_dtype == self._param.dtype
            if remainder and not same and self._in_model:
                assert weight_key is not None
                found[MAIN] = self._new(torch.float32)
                part = state_part(self._param, found[MAIN])
                self._plan.join(weight_key, encoded["key"], part)
            else:
                self._read_entry(MAIN, found)
        elif (
            weight_key is not None
            and saved_dtype is not None
            and saved_dtype.itemsize > self._param.dtype.itemsize
            and self._name not in self._plan.unread
        ):
            found[MAIN] = self._new(torch.float32)
            self._fill(found[MAIN], weight_key)


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
