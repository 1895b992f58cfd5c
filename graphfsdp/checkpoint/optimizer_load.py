"""What is read into an optimizer: states in place where they fit, groups by parameter name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like, wrap_rows_like
from graphfsdp.checkpoint.in_place import load_in_place
from graphfsdp.checkpoint.load_plan import MAIN, LoadPlan
from graphfsdp.checkpoint.named import (
    cut,
    like_parameter,
    name_parameters,
    shape_of,
)
from graphfsdp.checkpoint.optimizer_save import kind_of
from graphfsdp.checkpoint.parts import whole
from graphfsdp.checkpoint.values import Json, decode
from graphfsdp.errors import ConfigError
from graphfsdp.optim.adapters.skip_counter import make_skip_counter
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.state_loading import match_state_dict

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


@dataclass
class OptimizerPlan:
    """A state dict whose tensors are filled by the load.

    Attributes:
        optimizer: Which takes it in the end.
        state_dict: As its ``state_dict`` gives it; tensors are its own where they fit.
        skipped: How many steps were skipped, for one that does not count them itself.
    """

    optimizer: torch.optim.Optimizer
    state_dict: dict[str, Any] = field(default_factory=dict)
    skipped: Tensor | None = None

    def finish(self) -> None:
        """Give the optimizer what was read."""
        load_in_place(self.optimizer, self.state_dict)
        if self.skipped is not None:
            make_skip_counter(self.optimizer).copy_(self.skipped)


def plan_optimizer(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> None:
    """Plan to read the state of an optimizer; note what does not fit."""
    saved = plan.manifest.facts.get("optimizer")
    if saved is None:
        plan.problems.append("optimizer: the checkpoint was saved without one")
        return
    kind = kind_of(optimizer)
    if kind != saved["kind"] and not {kind, saved["kind"]} <= _ADAMS:
        plan.problems.append(f"optimizer: saved from {saved['kind']}, here a {kind}")
        return
    found = OptimizerPlan(optimizer)
    current = optimizer.state_dict()
    named = name_parameters(plan.model, optimizer)
    found.state_dict = {**current, "state": {}, "param_groups": []}
    num_problems = len(plan.problems)
    for group, here in zip(named, current["param_groups"], strict=True):
        found.state_dict["param_groups"].append(_plan_group(plan, saved, group, here, optimizer))
        for (name, param), index in zip(group, here["params"], strict=True):
            entries = current["state"].get(index, {})
            read = _StateReader(plan, saved["state"], name, param, entries, optimizer).read()
            if read:
                found.state_dict["state"][index] = read
    _note_left_over(plan, saved, named)
    rest = decode(saved["rest"], lambda key: _read_whole(plan, key))
    found.state_dict |= {key: value for key, value in rest.items() if key in current}
    if "control" in rest and "control" not in current:
        found.skipped = rest["control"]["skipped_steps"]
    if len(plan.problems) == num_problems and isinstance(optimizer, DeviceOptimizer):
        try:
            match_state_dict(found.state_dict, optimizer.param_groups, optimizer.settings)
        except ConfigError as error:
            plan.problems.append(f"optimizer: {error}")
            return
    plan.afterwards.append(found.finish)


def _plan_group(
    plan: LoadPlan,
    saved: Mapping[str, Json],
    group: Sequence[tuple[str, Tensor]],
    here: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return the group with the hyper-parameters that its parameters were saved with."""
    row_of = {name: row for row, g in enumerate(saved["groups"]) for name in g["params"]}
    rows: dict[int, str] = {}
    for name, _ in group:
        first = plan.model.members(name)[0].name if name in plan.model.tensors else name
        if first in row_of:
            rows.setdefault(row_of[first], name)
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
    compares = isinstance(optimizer, DeviceOptimizer)  # its state_dict does, with better words
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


def _note_left_over(
    plan: LoadPlan, saved: Mapping[str, Json], named: Sequence[Sequence[tuple[str, Tensor]]]
) -> None:
    here = {
        member
        for group in named
        for name, _ in group
        for member in (
            [m.name for m in plan.model.members(name)] if name in plan.model.tensors else [name]
        )
    }
    for name in saved["state"]:
        if name not in here:
            plan.problems.append(
                f"optimizer: the checkpoint has a state of {name!r}, which this one does not train"
            )


class _StateReader:
    """Plans to read the state of one parameter."""

    def __init__(
        self,
        plan: LoadPlan,
        saved: Mapping[str, dict[str, Json]],
        name: str,
        param: Tensor,
        entries: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._plan = plan
        self._name = name
        self._param = param
        self._entries = entries
        self._optimizer = optimizer
        in_model = name in plan.model.tensors
        self._members = plan.model.members(name) if in_model else None
        names = [name] if self._members is None else [m.name for m in self._members]
        self._states = [saved[n] for n in names if n in saved]
        self._complete = len(self._states) == len(names)
        self._wants_main = MAIN in entries
        self._main_dtype = torch.float32
        self._device = local_part(param).device
        if isinstance(optimizer, DeviceOptimizer):
            dtypes = optimizer.settings.state_dtypes(param)
            self._wants_main = MAIN in dtypes
            self._main_dtype = dtypes.get(MAIN, torch.float32)
            self._device = optimizer.state_device(param)

    def read(self) -> dict[str, Any]:
        """Return the state, its tensors yet to be filled; empty if none was saved."""
        if not self._states:
            return self._never_stepped()
        if not self._complete:
            self._plan.problems.append(
                f"optimizer: only some of the matrices in {self._name!r} have a saved state"
            )
            return {}
        found: dict[str, Any] = {}
        for key in self._states[0]:
            if key != MAIN:
                self._read_entry(key, found)
        if self._wants_main:
            self._read_main(found)
        return found

    def _never_stepped(self) -> dict[str, Any]:
        """Return a state of zeros if only that can hold a main weight that was saved wider."""
        if not (isinstance(self._optimizer, DeviceOptimizer) and self._wants_main):
            return {}
        found: dict[str, Any] = {}
        self._read_main(found)
        if found:
            found["step"] = torch.zeros(())
            for key in self._optimizer.settings.state_dtypes(self._param):
                found.setdefault(key, self._new(torch.float32).zero_())
        return found

    def _read_entry(self, key: str, found: dict[str, Any]) -> None:
        encoded = [state.get(key) for state in self._states]
        keys = [e["key"] for e in encoded if isinstance(e, dict) and "key" in e]
        if not keys:
            if any(e != encoded[0] for e in encoded):
                self._plan.problems.append(
                    f"optimizer: the matrices in {self._name!r} have different {key!r}: {encoded}"
                )
            found[key] = decode(encoded[0], _no_tensor)
        elif self._members is None or self._is_of_no_row(key, keys[0]):
            found[key] = _read_whole(self._plan, keys[0])
        else:
            self._read_tensor(key, keys, found)

    def _is_of_no_row(self, key: str, saved_key: str) -> bool:
        """Return whether a state belongs to all rows of its parameter."""
        saved = self._plan.manifest.tensors[saved_key]
        return key in _FACTORS and saved.shape[:1] != tuple(self._param.shape[:1])

    def _read_tensor(self, key: str, keys: Sequence[str], found: dict[str, Any]) -> None:
        assert self._members is not None
        saved = self._plan.manifest.tensors[keys[0]]
        shape = self._shape(key, saved.shape)
        if not all(
            self._plan.fits(k, shape_of(m, shape), f"optimizer: {key} of {m.name!r}")
            for k, m in zip(keys, self._members, strict=True)
        ):
            return
        target = self._target(key, saved.dtype, shape)
        part = self._plan.model.part(self._param, target)
        for saved_key, member in zip(keys, self._members, strict=True):
            for _, piece in cut("", [member], part):
                self._plan.parts.append((saved_key, piece))
        found[key] = target

    def _shape(self, key: str, saved: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a state has here."""
        existing = self._entries.get(key)
        if isinstance(existing, Tensor):
            return self._plan.model.part(self._param, existing).whole_shape
        if key.endswith("_scale") or key in _FACTORS:  # rows of their own length
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
        rows = torch.empty((*local.shape[:1], *shape[1:]), dtype=dtype, device=self._device)
        return wrap_rows_like(rows, self._param)

    def _new(self, dtype: torch.dtype) -> Tensor:
        """Return a new state with the parameter's shape and placements."""
        return wrap_like(like_parameter(self._param, dtype, self._device), self._param)

    def _read_main(self, found: dict[str, Any]) -> None:
        """Read the main weight, whatever form it was saved in; see Note [Main weights]."""
        saved_dtype = self._plan.saved_dtype(self._name) if self._members is not None else None
        encoded = [state.get(MAIN) for state in self._states]
        keys = [e["key"] for e in encoded if e is not None]
        if keys:
            remainder = self._plan.manifest.tensors[keys[0]].dtype == torch.int16
            same = self._main_dtype == torch.int16 and saved_dtype == self._param.dtype
            if remainder and not same and self._members is not None:
                target = self._new(torch.float32)
                part = self._plan.model.part(self._param, target)
                self._plan.join(self._name, keys, part)
                found[MAIN] = target
            else:
                self._read_entry(MAIN, found)
        elif saved_dtype is not None and saved_dtype.itemsize > self._param.dtype.itemsize:
            assert self._members is not None
            target = self._new(torch.float32)
            part = self._plan.model.part(self._param, target)
            for member in self._members:
                saved_key = self._plan.saved_key(member.name)
                assert saved_key is not None
                self._plan.parts += [(saved_key, p) for _, p in cut("", [member], part)]
            found[MAIN] = target


def _read_whole(plan: LoadPlan, key: str) -> Tensor:
    """Plan to read a tensor that belongs to no parameter, and return it."""
    saved = plan.manifest.tensors[key]
    tensor = torch.empty(saved.shape, dtype=saved.dtype)
    plan.parts.append((key, whole(tensor)))
    return tensor


def _no_tensor(key: str) -> Tensor:
    raise KeyError(key)
