"""A stand-in for Transformer Engine's FusedAdam, made after a recorded contract.

The contract is in references/fused_adam_contract.json.
"""

import ast
import json
import pathlib
from typing import Any

import torch
from torch import Tensor

CONTRACT: dict[str, Any] = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "fused_adam_contract.json").read_text()
)


def make_stand_in(contract: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return a class FusedAdam that takes, keeps and refuses what the contract says."""
    names, defaults = contract["constructor"], contract["defaults"]
    readable = {"torch.float32": torch.float32}
    values = {
        key: readable[text] if text in readable else ast.literal_eval(text)
        for key, text in defaults.items()
    }

    class FusedAdam(torch.optim.Optimizer):
        def __init__(self, params: Any, **given: Any) -> None:
            unknown = set(given) - set(names)
            if unknown:
                raise TypeError(f"unexpected arguments {sorted(unknown)}")
            made = {**values, **given}
            numbers = {k: made[k] for k in ("bias_correction", "betas", "eps", "weight_decay")}
            lr = torch.tensor(made["lr"]) if made["capturable"] else made["lr"]
            super().__init__(params, {"lr": lr, **numbers})
            for group in self.param_groups:
                if made["capturable"]:  # fails for a number, as it does there
                    group["lr"] = group["lr"].to(group["params"][0].device)
            if made["capturable"]:
                self._step_supports_amp_scaling = True
            for name in set(contract["attributes"]) & made.keys():
                setattr(self, name, made[name])
            device = self.param_groups[0]["params"][0].device
            self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device=device)

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                _stand_in_step(self, group, grad_scaler)

    FusedAdam.__module__ = "transformer_engine.optimizers"
    return FusedAdam


@torch.no_grad()
def _stand_in_step(optimizer: Any, group: dict[str, Any], grad_scaler: Any) -> None:
    device = group["params"][0].device
    if "step" in group:
        group["step"] += (optimizer._dummy_overflow_buf != 1).to(torch.int)
    else:
        group["step"] = torch.tensor([1], dtype=torch.int, device=device)
    flag, inv_scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    if grad_scaler is not None:
        flag = grad_scaler._check_inf_per_device(optimizer)[device]
        inv_scale = grad_scaler._get_scale_async().double().reciprocal().float()
    optimizer._dummy_overflow_buf.copy_(flag)
    for param in group["params"]:
        attribute = "decoupled_grad" if getattr(optimizer, "use_decoupled_grad", False) else "grad"
        grad = getattr(param, attribute, None)
        if grad is None:
            continue
        state = optimizer.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        _apply_kernel(param, grad, state, group, optimizer._dummy_overflow_buf != 1, inv_scale)


def _apply_kernel(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
    go: Tensor,  # [1] bool
    inv_scale: Tensor,  # [1] float32
) -> None:
    """The capturable kernel as tensor code; it writes the gradient back, too."""
    beta1, beta2 = group["betas"]
    grad.mul_(torch.where(go, inv_scale, torch.ones_like(inv_scale)).to(grad.dtype))
    first = beta1 * state["exp_avg"] + (1 - beta1) * grad
    second = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
    count = group["step"].double()
    correction1, correction2 = (1 - beta**count for beta in (beta1, beta2))
    update = (first / correction1.float()) / ((second / correction2.float()).sqrt() + group["eps"])
    new = param - group["lr"] * (update + group["weight_decay"] * param)
    for target, value in ((state["exp_avg"], first), (state["exp_avg_sq"], second), (param, new)):
        target.copy_(torch.where(go, value, target))
