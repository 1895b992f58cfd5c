"""FusedAdam: one pass over memory, always capturable.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.base.dtensors import sharding_groups
from graphfsdp.base.norms import by_groups
from graphfsdp.base.streams import keep_for_graph
from graphfsdp.base.torch_internals import without_modes
from graphfsdp.optim.fused.live_optimizer import LiveOptimizer, StepControl
from graphfsdp.optim.fused.plan import Plan, find_stepped, gradients_of
from graphfsdp.optim.fused.state import (
    Flags,
    Saved,
    State,
    StepSettings,
    check_main_dtype,
    check_saved_group,
    create_states,
    match_entries,
)


class FusedAdam(LiveOptimizer):
    """Adam with all that changes kept on the device: steps, lr, decay, betas, eps.

    ``param_groups`` hold ordinary Python numbers. They may be changed at any time, by hand or by a
    scheduler: ``step`` and every replay of a captured step read them anew.

    State per parameter: ``step`` [] float32, ``exp_avg`` and ``exp_avg_sq`` [...], with amsgrad
    ``max_exp_avg_sq`` [...], and with main weights ``master_param`` [...] float32. State is made at
    the first step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = True,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        maximize: bool = False,
        skip_nonfinite: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            lr: Learning rate.
            betas: Decay rates of the two moments, each in [0, 1).
            eps: Added to the root of the second moment, after bias correction.
            weight_decay: Fraction of the weight removed per unit of learning rate.
            amsgrad: Divide by the largest second moment so far.
            adam_w_mode: Decoupled weight decay (AdamW); otherwise decay joins the gradient.
            bias_correction: Correct the moments for their start at zero.
            capturable: Changes nothing: every FusedAdam is. It is here because constructor calls
                for torch and Transformer Engine have it.
            use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``, so that
                the gradient's dtype need not be the parameter's.
            master_weights: Keep float32 main weights for bfloat16 and float16 parameters.
            master_weight_dtype: torch.float32.
            exp_avg_dtype: Dtype in which the first moment is stored: float32 or bfloat16.
            exp_avg_sq_dtype: The same for the second moment.
            maximize: Climb instead of descending.
            skip_nonfinite: Leave everything as it is where a gradient, or the norm of all of them
                in float32, is not finite.
            max_grad_norm: Clip the gradients' global norm, inside the update.

        Raises:
            ConfigError: a hyper-parameter is out of its range, or a parameter cannot be trained.
        """
        check_main_dtype(master_weight_dtype)
        settings = StepSettings(
            Flags(adam_w_mode, bias_correction, maximize),
            use_decoupled_grad,
            master_weights,
            skip_nonfinite,
            max_grad_norm,
            exp_avg_dtype,
            exp_avg_sq_dtype,
            amsgrad,
        )
        self._settings = settings
        control = StepControl(settings.skip_nonfinite, settings.max_grad_norm)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._plan: Plan | None = None
        self._by_hand: list[object] = []  # plans that a graph reads which was captured by hand
        super().__init__(params, defaults, control)

    @property
    def settings(self) -> StepSettings:
        """What the constructor was told."""
        return self._settings

    @property
    def use_decoupled_grad(self) -> bool:
        return self._settings.use_decoupled_grad

    @property
    def master_weights(self) -> bool:
        """Whether low-precision parameters have float32 main weights."""
        return self._settings.master_weights

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        return self._settings.main_weight_dtype(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._plan = None

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Capture: no host sync; one operation per device and dtype combination."""
        params = self._parameters()
        grads = gradients_of(params, decoupled=self.use_decoupled_grad)
        plan = self._plan
        if plan is None or not plan.holds(grads, self.state.values()):
            plan = self._make_plan(params, grads)
        keep_for_graph(plan, self._by_hand)
        parts = None
        if self._control.needs_norm(found_inf):
            here = [None if grad is None or not grad.numel() else grad for grad in grads]
            parts = by_groups(zip(map(sharding_groups, params), here, strict=True))
        grad_scale, found_inf = self._control.prepare(parts, grad_scale, found_inf)
        plan.run(grads, grad_scale, found_inf, self._control.skipped_steps, self._settings.flags)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset ``grad`` and, where it is used, ``decoupled_grad`` of every parameter.

        Args:
            set_to_none: Unbind the gradients instead of filling them with zeros.
        """
        super().zero_grad(set_to_none)
        for param in self._parameters() if self.use_decoupled_grad else ():
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None and set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif grad is not None:
                grad.detach().zero_()

    def _check_saved(self, saved: Mapping[str, Any], row: int) -> None:
        check_saved_group(saved, row, self._settings)

    def _match_entries(self, saved: Saved) -> State:
        return match_entries(saved, self._settings)

    def _new_states(self, params: Sequence[Tensor]) -> dict[Tensor, State]:
        return create_states(params, self._settings)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _make_plan(self, params: list[Tensor], grads: list[Tensor | None]) -> Plan:
        self._refuse_in_capture()
        found = find_stepped(self.param_groups, grads, self.state, self._settings)
        self._hyper.refresh(self.param_groups)
        self.create_missing([item.param for item in found])
        with without_modes():  # as in create_missing
            self._plan = Plan(params, grads, found, self.state, self._hyper.on)
            self._control.place(self._plan.device)
        return self._plan
