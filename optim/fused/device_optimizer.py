"""The step that FusedAdam, FusedSGD and FusedLion share: everything that changes is on the device.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp.base.dtensors import local_part
from graphfsdp.base.recut import recut_states
from graphfsdp.errors import CaptureError, ConfigError
from graphfsdp.optim.fused.grad_scaler import DeviceGradScaler
from graphfsdp.optim.fused.hyper_table import HyperTable
from graphfsdp.optim.fused.rules import RULES, check_buffers
from graphfsdp.optim.fused.state_loading import (
    Loaded,
    copy_states,
    load_groups,
    match_state_dict,
)
from graphfsdp.optim.fused.step_batch import Member
from graphfsdp.optim.fused.step_checks import check_lr_device, refuse_copies
from graphfsdp.optim.fused.step_control import StepControl
from graphfsdp.optim.fused.step_members import check_params, find_stepped, reset_decoupled
from graphfsdp.optim.fused.step_plan import Plan, gradients_of, local_state
from graphfsdp.optim.fused.step_settings import StepSettings
from graphfsdp.optim.fused.step_state import create_states, split_classes, step_classes


class DeviceOptimizer(torch.optim.Optimizer):
    """An optimizer whose step counts, numbers and decisions are on the device.

    ``param_groups`` hold ordinary Python numbers (lr may be a tensor). They may be changed at any
    time, by hand or by a scheduler: ``step`` and every replay of a captured step read them anew.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        settings: StepSettings,
        grad_scaler: DeviceGradScaler | None,
    ) -> None:
        """Set up what the rules share.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            defaults: Numbers of a group that has none of its own.
            settings: What holds for all groups.
            grad_scaler: Unscales the gradients.

        Raises:
            ConfigError: a hyper-parameter is out of its range, or a parameter cannot be trained.
        """
        self._settings = settings
        self._control = StepControl(settings, grad_scaler)
        self._reset()
        super().__init__(params, defaults)

    def _reset(self) -> None:
        self._hyper = HyperTable(RULES[self._settings.flags.rule])
        self._plan: Plan | None = None
        self.step_classes: dict[Tensor, int] = {}  # see ``Classed``
        # A graph reads the tables of the plans that were captured with it.
        self._captured_plans: set[Plan] = set()

    @property
    def settings(self) -> StepSettings:
        """What the constructor was told."""
        return self._settings

    @property
    def use_decoupled_grad(self) -> bool:
        """Whether ``param.decoupled_grad`` is read instead of ``param.grad``."""
        return self._settings.use_decoupled_grad

    @property
    def master_weights(self) -> bool:
        """Whether low-precision parameters have float32 main weights."""
        return self._settings.master_weights

    @property
    def control(self) -> StepControl:
        """The device tensors that steer steps: skipped steps, the gradient norm, the scaler."""
        return self._control

    @property
    def state_kind(self) -> str:
        """What a checkpoint calls the state: optimizers of one kind load each other's."""
        return type(self).__name__

    def state_device(self, param: Tensor) -> torch.device:
        """Return where the state of ``param`` is, or will be."""
        return local_part(param).device

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the weight that is updated for ``param``."""
        return self._settings.main_weight_dtype(param)

    def hyper_table(self, device: torch.device) -> Tensor:
        """Return the [groups, 5] float64 table that steps on a device read."""
        self._hyper.refresh(self.param_groups)
        return self._hyper.on(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a captured step must be captured again afterwards.

        Raises:
            ConfigError: as for the constructor.
        """
        super().add_param_group(param_group)
        row = len(self.param_groups) - 1
        try:
            RULES[self._settings.flags.rule].check(self.param_groups[row], row)
            check_params(self.param_groups, row, self._settings)
            check_lr_device(self.param_groups[row], row)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._plan = None
        self._hyper.clear()

    def upload_hyperparameters(self) -> None:
        """Copy the numbers in ``param_groups`` to the device where they changed.

        Raises:
            ConfigError: a changed value is out of its range.

        Capture: not a part of the iteration: nothing is recorded. Call it before each replay.
        """
        check_buffers(self.param_groups, self._settings.has_moments)
        self._hyper.refresh(self.param_groups)

    @overload
    def step(
        self,
        closure: None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None: ...

    @overload
    def step(
        self,
        closure: Callable[[], float],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,  # [] float, multiplies every gradient
        found_inf: Tensor | None = None,  # [] float, nothing is changed unless it is zero
    ) -> float | None:
        """Take one step with the gradients that are bound now.

        Gradients are only read. Parameters without a gradient are skipped: their step count stays.

        Args:
            closure: Computes the loss anew and returns it.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigError: a gradient or a changed hyper-parameter cannot be used; it is named.
            CaptureError: a CUDA graph is being captured and the step needs new state or new
                tables, which only a step before the capture can make.

        Capture: no host sync; one operation per device and dtype combination. The first step,
            and one after a change of addresses, must be taken outside a CUDA capture.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not _is_capturing():
            self.upload_hyperparameters()
        params = self._parameters()
        grads = gradients_of(params, decoupled=self.use_decoupled_grad)
        plan = self._plan
        if plan is None or not plan.holds(grads, self.state.values()):
            plan = self._make_plan(grads)
        if _is_capturing():
            self._captured_plans.add(plan)
        self._hyper.copy_tensor_lrs(self.param_groups)
        parts = plan.norm_parts(params, grads) if self._control.needs_norm(found_inf) else None
        grad_scale, found_inf = self._control.prepare(parts, grad_scale, found_inf)
        plan.run(grads, grad_scale, found_inf, self._control.skipped_steps, self._settings.flags)
        self._control.finish(found_inf)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset ``grad`` and, where it is used, ``decoupled_grad`` of every parameter.

        Args:
            set_to_none: Unbind the gradients instead of filling them with zeros.
        """
        super().zero_grad(set_to_none)
        if self.use_decoupled_grad:
            reset_decoupled(self._parameters(), set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with ``control`` beside it: skipped steps and loss scale."""
        return {**super().state_dict(), "control": self._control.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's for the same rule, into the tensors that exist.

        Addresses and dtypes stay, so a captured step goes on with the loaded values. State that
        does not exist yet is made.

        Raises:
            ConfigError: the groups, a shape or a setting does not fit; it is named. Nothing has
                been changed then.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        state_dict = recut_states(state_dict, self)
        loaded = match_state_dict(state_dict, self.param_groups, self._settings)
        with torch.no_grad(), _disable_current_modes():
            self.load_states(loaded)
            if "control" in state_dict:
                self._control.load_state_dict(state_dict["control"])
        load_groups(state_dict, self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def load_states(self, loaded: Loaded) -> None:
        """Copy what ``match_state_dict`` found; state that does not exist yet is made."""
        self.create_missing([param for param, source in loaded.items() if source])
        copy_states(loaded, self.state)
        self.count_classes()
        self._plan = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; its tensors are no slices, since a slice pickles the whole."""
        refuse_copies(self.state)
        state = {
            param: {key: value.detach().clone() for key, value in entries.items()}
            for param, entries in self.state.items()
        }
        return {
            **super().__getstate__(),
            "state": state,
            "_settings": self._settings,
            "_control": self._control,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy: the state goes back into slices of common buffers."""
        self._settings = state["_settings"]
        self._reset()
        super().__setstate__(state)
        copied = dict(self.state)
        self.state.clear()
        with torch.no_grad():
            self.create_missing(list(copied))
            for param, entries in copied.items():
                for key, value in entries.items():
                    self.state[param][key].copy_(value)
        self.count_classes()

    @torch.no_grad()
    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give state that exists the values of new state, in place.

        Args:
            states: State by parameter, all of it entries of ``state``.
        """
        rows = [
            (row, param)
            for row, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in states
        ]
        for param, fresh in create_states(rows, self._settings).items():
            for key, value in fresh.items():
                states[param][key].copy_(value)
        self.count_classes()
        if len(states) == len(self.state):  # no step was taken before
            self._control.restart()

    def count_classes(self) -> None:
        """Find out which parameters have equal step counts, after these were written."""
        self.step_classes = step_classes(self.state, self.step_classes)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _make_plan(self, grads: list[Tensor | None]) -> Plan:
        if _is_capturing():
            raise CaptureError(
                f"{type(self).__name__} has to make state or address tables, which is not possible "
                "inside a CUDA graph capture. Take at least one step with the same gradient "
                "tensors before the capture (warmup_steps >= 1), and keep their addresses"
            )
        params = self._parameters()
        members = find_stepped(self.param_groups, grads, self.state, self._settings)
        # Host work that a recording must not hold: it happens once.
        with _disable_current_modes():
            self._hyper.refresh(self.param_groups)
            stepped = [member.param for member in members]
            known = {param: n for param, n in self.step_classes.items() if self.state.get(param)}
            self.create_missing(stepped)
            self.step_classes = split_classes(known, stepped)
            found = [
                Member(
                    index,
                    local_part(param),
                    grad,
                    local_state(self.state[param]),
                    row,
                    self.step_classes[param],
                )
                for index, row, param, grad in members
            ]
            self._plan = Plan(params, grads, found, self.state.values(), self._hyper.on)
            self._control.place(self._plan.device)
        return self._plan

    def create_missing(self, params: Iterable[Tensor]) -> None:
        """Make the state of parameters that have none."""
        wanted = {param for param in params if not self.state.get(param)}
        rows = [
            (row, param)
            for row, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in wanted
        ]
        self.state.update(create_states(rows, self._settings))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
