"""A stand-in for Transformer Engine's FusedAdam, made after a recorded contract.

The contract is in references/fused_adam_contract.json. ``load_source`` runs the Python of the
installed library with its CUDA kernels replaced by tensor code.
"""

import ast
import importlib.util
import inspect
import json
import pathlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CONTRACT: dict[str, Any] = json.loads(
    (pathlib.Path(__file__).parents[1] / "references" / "fused_adam_contract.json").read_text()
)
_PACKAGE, _SOURCE = "transformer_engine", "pytorch/optimizers/fused_adam.py"


def adam_kernel(
    chunk_numel: int,
    noop: Tensor,  # [1] int32
    lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,  # [1] int32
    adam_w_mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """The capturable kernel as tensor code; it writes gradients back, too."""
    go = noop != 1
    correction1 = 1 - beta1 ** step.double() if bias_correction else torch.ones(1)
    correction2 = 1 - beta2 ** step.double() if bias_correction else torch.ones(1)
    for grad, param, exp_avg, exp_avg_sq, *main in zip(*lists, strict=True):
        grad.mul_(torch.where(go, inv_scale, torch.ones_like(inv_scale)).to(grad.dtype))
        weight = (main[0] if main else param).float()
        g = grad.float() if adam_w_mode else grad.float() + weight_decay * weight
        first = beta1 * exp_avg.float() + (1 - beta1) * g
        second = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
        update = (first / correction1.float()) / ((second / correction2.float()).sqrt() + eps)
        if adam_w_mode:
            update = update + weight_decay * weight
        new = weight - lr * update
        for target, value in ((exp_avg, first), (exp_avg_sq, second), (param, new)):
            target.copy_(torch.where(go, value.to(target.dtype), target))
        if main:
            main[0].copy_(torch.where(go, new, main[0]))


def make_stand_in(contract: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return a class FusedAdam that takes, keeps and refuses what the contract says."""
    names, defaults = contract["constructor"], contract["defaults"]
    readable = {"torch.float32": torch.float32}
    values = {
        key: readable[text] if text in readable else ast.literal_eval(text)
        for key, text in defaults.items()
    }

    class FusedAdam(torch.optim.Optimizer):
        __signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=values.get(name, inspect.Parameter.empty),
                )
                for name in names
            ]
        )

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

    FusedAdam.__module__ = f"{_PACKAGE}.optimizers"
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
        lists = [[grad], [param], [state["exp_avg"]], [state["exp_avg_sq"]]]
        numbers = (group["lr"], *group["betas"], group["eps"], group["step"])
        rest = (1, 1, group["weight_decay"], inv_scale)
        _apply(adam_kernel, optimizer._dummy_overflow_buf, lists, *numbers, *rest)


class _TorchOnCpu(types.ModuleType):
    """torch, but that what is made on CUDA is made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, **settings: Any) -> Tensor:
        if settings.get("device") == "cuda":
            settings["device"] = "cpu"
        return torch.tensor(data, **settings)


class _Anything(types.ModuleType):
    """A module that has every name, as a class of which nothing is an instance."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"kFloat32": 0})


def _apply(kernel: Callable[..., None], noop: Tensor, lists: Any, *args: Any) -> None:
    kernel(65536, noop, lists, *args)


def load_source() -> Any:
    """Return the module of the installed library's FusedAdam; its kernels are ``adam_kernel``.

    Returns None where the library's Python is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    paths = [pathlib.Path(root) / _SOURCE for root in roots]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    kernels = _Anything("kernels")
    for name in ("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"):
        setattr(kernels, name, adam_kernel)
    applier = types.ModuleType("applier")
    _apply.available = True  # type: ignore[attr-defined]
    applier.multi_tensor_applier = _apply  # type: ignore[attr-defined]
    replaced = {
        "torch": _TorchOnCpu("torch"),
        "transformer_engine_torch": kernels,
        "multi_tensor_apply": applier,
    }
    module = types.ModuleType(f"{_PACKAGE}.optimizers.fused_adam")
    module.__dict__["__builtins__"] = {**vars(__import__("builtins")), "__import__": None}

    def load(
        name: str, scope: Any = None, local: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        if name in replaced:
            return replaced[name]
        if level or name.startswith(_PACKAGE):
            return _Anything(name)
        return __import__(name, scope, local, wanted, level)

    module.__dict__["__builtins__"]["__import__"] = load
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module
