"""FusedAdam: Adam and AdamW that are always capturable.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp.dtensors import local_part
from graphfsdp.errors import CaptureError, ConfigError
from graphfsdp.optim.adam_checks import (
    check_gradient,
    check_group,
    check_lr_device,
    check_parameter,
    check_state,
)
from graphfsdp.optim.adam_plan import Flags, Member, Plan, gradients_of, local_state
from graphfsdp.optim.adam_state import (
    create_states,
    main_weight_dtype,
    split_classes,
    step_classes,
)
from graphfsdp.optim.hyper_table import HyperTable
from graphfsdp.optim.state_loading import copy_states, load_groups, match_state_dict


class FusedAdam(torch.optim.Optimizer):
    """Adam with all that changes kept on the device: steps, lr, decay, betas, eps.

    ``param_groups`` hold ordinary Python numbers (lr may be a tensor). They may be changed at any
    time, by hand or by a scheduler: ``step`` and every replay of a captured step read them anew.

    State per parameter: ``step`` [] float32, ``exp_avg`` and ``exp_avg_sq`` [...] float32, and
    ``master_param`` [...] float32 with main weights. It is made at the first step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            lr: Learning rate; a tensor must be on the parameters' device.
            betas: Decay rates of the two moments, each in [0, 1).
            eps: Added to the root of the second moment, after bias correction.
            weight_decay: Fraction of the weight removed per unit of learning rate.
            adam_w_mode: Decoupled weight decay (AdamW); otherwise decay joins the gradient.
            bias_correction: Correct the moments for their start at zero.
            use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``, so that
                the gradient's dtype need not be the parameter's.
            master_weights: Keep float32 main weights for bfloat16 and float16 parameters.

        Raises:
            ConfigError: a hyper-parameter is out of its range, or a parameter cannot be trained.
        """
        self._flags = Flags(adam_w_mode, bias_correction)
        self._use_decoupled_grad = use_decoupled_grad
        self._master_weights = master_weights
        self._hyper = HyperTable()
        self._has_table = False
        self._plan: Plan | None = None
        # A graph reads the tables of the plans that were captured with it.
        self._captured_plans: set[Plan] = set()
        self._classes: dict[Tensor, int] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return self._flags.adam_w_mode

    @property
    def bias_correction(self) -> bool:
        """Whether the moments are corrected for their start at zero."""
        return self._flags.bias_correction

    @property
    def use_decoupled_grad(self) -> bool:
        """Whether ``param.decoupled_grad`` is read instead of ``param.grad``."""
        return self._use_decoupled_grad

    @property
    def master_weights(self) -> bool:
        """Whether low-precision parameters have float32 main weights."""
        return self._master_weights

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the weight that is updated for ``param``."""
        return main_weight_dtype(param, master_weights=self._master_weights)

    def hyper_table(self, device: torch.device) -> Tensor:
        """Return the [groups, 5] float64 table that steps on a device read."""
        self._ensure_table()
        return self._hyper.on(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a captured step must be captured again afterwards.

        Raises:
            ConfigError: as for the constructor.
        """
        super().add_param_group(param_group)
        row = len(self.param_groups) - 1
        try:
            check_group(self.param_groups[row], row)
            for index, param in enumerate(self.param_groups[row]["params"]):
                check_parameter(local_part(param), self._name(row, index))
            check_lr_device(self.param_groups[row], row)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._plan = None
        self._has_table = False

    def upload_hyperparameters(self) -> None:
        """Copy the numbers in ``param_groups`` to the device where they changed.

        Raises:
            ConfigError: a changed value is out of its range.

        Capture: not a part of the iteration: nothing is recorded. Call it before each replay.
        """
        if self._has_table:
            self._hyper.upload(self.param_groups)
        else:
            self._ensure_table()

    @overload
    def step(self, closure: None = None, *, grad_scale: Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, grad_scale: Tensor | None = None) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,  # [] float, multiplies every gradient
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
        grads = gradients_of(self._parameters(), decoupled=self._use_decoupled_grad)
        plan = self._plan
        if plan is None or not plan.holds(grads, self.state.values()):
            plan = self._make_plan(grads)
        if _is_capturing():
            self._captured_plans.add(plan)
        self._hyper.copy_tensor_lrs(self.param_groups)
        plan.run(grads, grad_scale, self._flags)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset ``grad`` and, where it is used, ``decoupled_grad`` of every parameter.

        Args:
            set_to_none: Unbind the gradients instead of filling them with zeros.
        """
        super().zero_grad(set_to_none)
        if not self._use_decoupled_grad:
            return
        for param in self._parameters():
            grad = getattr(param, "decoupled_grad", None)
            if grad is None:
                continue
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                grad.detach().zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of FusedAdam, or of torch's Adam or AdamW, into the tensors that exist.

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
        loaded = match_state_dict(
            state_dict, self.param_groups, self._name, adam_w_mode=self.adam_w_mode
        )
        with torch.no_grad(), _disable_current_modes():
            self._create_missing([param for param, source in loaded.items() if source])
            copy_states(loaded, self.state)
            self._classes = step_classes(self.state)
        load_groups(state_dict, self.param_groups)
        self._plan = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; its tensors are no slices, since a slice pickles the whole."""
        state = {
            param: {key: value.detach().clone() for key, value in entries.items()}
            for param, entries in self.state.items()
        }
        return {
            **super().__getstate__(),
            "state": state,
            "_flags": self._flags,
            "_use_decoupled_grad": self._use_decoupled_grad,
            "_master_weights": self._master_weights,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy: the state goes back into slices of common buffers."""
        self._hyper = HyperTable()
        self._has_table = False
        self._plan = None
        self._captured_plans = set()
        super().__setstate__(state)
        copied = dict(self.state)
        self.state.clear()
        with torch.no_grad():
            self._create_missing(list(copied))
            for param, entries in copied.items():
                for key, value in entries.items():
                    self.state[param][key].copy_(value)
            self._classes = step_classes(self.state)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _ensure_table(self) -> None:
        if not self._has_table:
            with torch.no_grad(), _disable_current_modes():
                self._hyper.build(self.param_groups)
            self._has_table = True

    def _make_plan(self, grads: list[Tensor | None]) -> Plan:
        if _is_capturing():
            raise CaptureError(
                "FusedAdam has to make state or address tables, which is not possible inside a "
                "CUDA graph capture. Take at least one step with the same gradient tensors "
                "before the capture (warmup_steps >= 1), and keep their addresses"
            )
        members = self._members(grads)
        # Host work that a recording must not hold: it happens once.
        with _disable_current_modes():
            self._ensure_table()
            stepped = [param for _, _, param, _ in members]
            known = {param: n for param, n in self._classes.items() if self.state.get(param)}
            self._create_missing(stepped)
            self._classes = split_classes(known, stepped)
            self._plan = Plan(
                self._parameters(),
                grads,
                [
                    Member(
                        index,
                        local_part(param),
                        grad,
                        local_state(self.state[param]),
                        row,
                        self._classes[param],
                    )
                    for index, row, param, grad in members
                ],
                self.state.values(),
                self._hyper.on,
            )
        return self._plan

    def _members(self, grads: list[Tensor | None]) -> list[tuple[int, int, Tensor, Tensor]]:
        """Return index, group, parameter and gradient of those that take the step."""
        members = []
        index = 0
        for row, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                grad = grads[index]
                if grad is not None:
                    name = self._name(row, position)
                    local = local_part(param)
                    check_gradient(local, grad, name)
                    if self.state.get(param):
                        check_state(local, local_state(self.state[param]), name)
                    members.append((index, row, param, grad))
                index += 1
        return members

    def _create_missing(self, params: Iterable[Tensor]) -> None:
        wanted = {param for param in params if not self.state.get(param)}
        rows = [
            (row, param)
            for row, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in wanted
        ]
        self.state.update(create_states(rows, master_weights=self._master_weights))

    def _name(self, row: int, position: int) -> str:
        names = self.param_groups[row].get("param_names")
        if names is not None:
            return f"parameter {names[position]!r}"
        return f"parameter {position} of group {row}"


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


__all__ = ["FusedAdam"]
