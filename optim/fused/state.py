"""The settings of a FusedAdam, what optimizers of ours refuse by name, and where state is kept.

State is in slices of one buffer per device and dtype.

Shapes: [...] the parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part, wrap_like
from graphfsdp.base.memory import FlatBuffer
from graphfsdp.errors import ConfigError

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MOMENT_DTYPES = (torch.float32, torch.bfloat16)
State = dict[str, Tensor]
# The saved state of each parameter; None where nothing was saved.
Loaded = dict[Tensor, State | None]


class Flags(NamedTuple):
    adam_w_mode: bool = True  # decoupled weight decay; otherwise decay is added to the gradient
    bias_correction: bool = True
    maximize: bool = False


@dataclass(frozen=True)
class StepSettings:
    """What the constructor was told; see ``FusedAdam``."""

    flags: Flags
    use_decoupled_grad: bool
    master_weights: bool
    skip_nonfinite: bool
    max_grad_norm: float | None
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    amsgrad: bool = False

    def __post_init__(self) -> None:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(self, name)
            if dtype not in _MOMENT_DTYPES:
                raise ConfigError(f"{name} must be torch.float32 or torch.bfloat16, got {dtype}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be a positive number, got {self.max_grad_norm}")

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        wide = self.master_weights and param.dtype in _LOW_PRECISION
        return torch.float32 if wide else param.dtype

    def state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """Without step count."""
        first, second = self.exp_avg_dtype, self.exp_avg_sq_dtype
        if param.dtype == torch.float64:
            first = second = torch.float64
        dtypes = {"exp_avg": first, "exp_avg_sq": second}
        if self.amsgrad:
            dtypes["max_exp_avg_sq"] = second
        main = self.main_weight_dtype(param)
        if main != param.dtype:
            dtypes["master_param"] = main
        return dtypes

    def in_groups(self) -> dict[str, bool]:
        """Return what torch's Adams have in each group, not once for all of them."""
        return {
            "amsgrad": self.amsgrad,
            "maximize": self.flags.maximize,
            "bias_correction": self.flags.bias_correction,
            "decoupled_weight_decay": self.flags.adam_w_mode,
        }


def check_main_dtype(master_weight_dtype: torch.dtype) -> None:
    if master_weight_dtype != torch.float32:
        raise ConfigError(f"master_weight_dtype must be torch.float32, got {master_weight_dtype}")


def parameter_name(groups: Sequence[Mapping[str, Any]]) -> Callable[[int, int], str]:
    """Return a function from group and position to the parameter's name for messages."""

    def name(row: int, position: int) -> str:
        names = groups[row].get("param_names")
        if names is not None:
            return f"parameter {names[position]!r}"
        return f"parameter {position} of group {row}"

    return name


def check_parameter(param: Tensor, name: str) -> None:
    if param.layout != torch.strided or not param.dtype.is_floating_point:
        raise ConfigError(
            f"only dense tensors of a real floating-point dtype can be trained; {name} has the "
            f"layout {param.layout} and the dtype {param.dtype}"
        )
    if any(size > 1 and step == 0 for size, step in zip(param.shape, param.stride(), strict=True)):
        raise ConfigError(
            f"{name} is expanded (shape {tuple(param.shape)}, strides {param.stride()}), so that "
            f"several elements share one place in memory; give a contiguous copy"
        )


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    problem = None
    if grad.layout != torch.strided:
        problem = (
            f"has the layout {grad.layout}; expected a dense one (for nn.Embedding: sparse=False)"
        )
    elif not grad.dtype.is_floating_point:
        problem = f"has the dtype {grad.dtype}; expected a real floating-point dtype"
    elif grad.shape != param.shape:
        problem = f"has the shape {tuple(grad.shape)}; expected {tuple(param.shape)}"
    elif grad.device != param.device:
        problem = f"is on {grad.device}; expected {param.device}, as its parameter"
    if problem is not None:
        raise ConfigError(f"the gradient of {name} {problem}")


class Saved(NamedTuple):
    """What a state dict has for one parameter."""

    param: Tensor
    row: int  # of its group
    name: str  # for messages
    entries: Mapping[str, Any]
    group: Mapping[str, Any]  # as it was saved


def create_states(params: Sequence[Tensor], settings: StepSettings) -> dict[Tensor, State]:
    """Allocate the state of parameters, of one kind and device in one buffer.

    Moments have the dtypes of the settings (float64 for a float64 parameter) and the parameter's
    strides, and start at zero. A main weight starts as the parameter. Step counts ([] float32) are
    slices of one buffer, so that advancing all of them is one operation. All but ``step`` are
    DTensors where the parameter is one.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        by_device.setdefault(param.device, []).append(param)
    states: dict[Tensor, State] = {}
    for device, members in by_device.items():
        steps = torch.zeros(len(members), dtype=torch.float32, device=device)
        wanted: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for param, step in zip(members, steps.unbind(), strict=True):
            states[param] = {"step": step}
            for name_and_dtype in settings.state_dtypes(param).items():
                wanted.setdefault(name_and_dtype, []).append(param)
        for (name, dtype), owners in wanted.items():
            locals_ = [local_part(param.detach()) for param in owners]
            views = FlatBuffer(locals_, dtype=dtype, device=device).views
            for param, local, tensor in zip(owners, locals_, views, strict=True):
                if name == "master_param":
                    tensor.copy_(local)
                states[param][name] = wrap_like(tensor, param)
    return states


# Settings of other Adams that say how they run, not what they compute.
_RUN_SETTINGS = frozenset({"foreach", "capturable", "differentiable", "fused"})
# Settings of groups elsewhere that are the whole optimizer's here; they are compared.
_COMPARED = frozenset({"amsgrad", "maximize", "bias_correction", "decoupled_weight_decay"})
_OF_TORCHS_MUON = frozenset({"nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"})
_NOT_LOADED = _RUN_SETTINGS | _COMPARED | _OF_TORCHS_MUON | {"params", "param_names", "step"}


def copy_states(loaded: Loaded, states: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Copy what was saved into the state tensors that exist, which keep address and dtype."""
    for param, source in loaded.items():
        saved = source or {}
        kept = states.get(param) or {}
        for key, tensor in kept.items():
            if key == "master_param" and key not in saved:
                local_part(tensor).copy_(local_part(param.detach()))
            elif key in saved:
                tensor.copy_(saved[key])
            else:  # saved before its first step
                tensor.zero_()


def load_groups(state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Take over the saved hyper-parameters."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for key, value in saved.items():
            if key in _NOT_LOADED:
                continue
            if isinstance(value, Tensor):
                group[key] = value.item()
            else:
                group[key] = tuple(value) if key == "betas" else value


def check_saved_group(saved: Mapping[str, Any], row: int, settings: StepSettings) -> None:
    """Refuse the group of an Adam that computes something else."""
    own = settings.in_groups()
    adam_w_mode = own.pop("decoupled_weight_decay")
    for key, value in own.items():
        if bool(saved.get(key, value)) != value:
            raise ConfigError(
                f"parameter group {row} was saved with {key}={bool(saved[key])}, this optimizer "
                f"has {key}={value}; construct FusedAdam with {key}={bool(saved[key])}"
            )
    decoupled = saved.get("decoupled_weight_decay", adam_w_mode)
    if bool(decoupled) != adam_w_mode and saved.get("weight_decay"):
        raise ConfigError(
            f"parameter group {row} was saved with decoupled_weight_decay={decoupled} and "
            f"weight_decay={saved['weight_decay']}, this FusedAdam has "
            f"adam_w_mode={adam_w_mode}: the same number means another decay; construct "
            f"FusedAdam with adam_w_mode={bool(decoupled)}"
        )


def match_entries(saved: Saved, settings: StepSettings) -> State:
    """Return the saved state of a parameter; refuse one that does not fit.

    It is that of FusedAdam, of torch's Adam or AdamW, or of the FusedAdam of Transformer Engine or
    apex, which count steps per group.
    """
    param, _, name, entries, group = saved
    step = entries.get("step", group.get("step"))
    found = {"step": saved_tensor({"step": step}, "step", None, name).float().reshape(())}
    keys = ["exp_avg", "exp_avg_sq"]
    if settings.amsgrad:
        keys.append("max_exp_avg_sq")
    if entries.get("master_param") is not None:
        keys.append("master_param")
    for key in keys:
        found[key] = saved_tensor(entries, key, param.shape, name)
        dtype = found[key].dtype
        if (
            "_".join((key, "scale")) in entries
            or dtype.itemsize == 1
            or not dtype.is_floating_point
        ):
            raise ConfigError(
                f"the saved {key!r} of {name} is in {dtype} with scales, or without the bits that "
                "its weight has, which no optimizer of this version knows; expected torch.float32 "
                "or torch.bfloat16. Remedy: load it with what has saved it, into one with float32 "
                "states, and save that"
            )
    return found


def _tensor(value: Any) -> Tensor:
    """Keep a tensor where it is, whatever torch's default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def saved_tensor(
    entries: Mapping[str, Any],
    key: str,
    shape: Sequence[int] | None,  # None: any
    name: str,
) -> Tensor:
    value = entries.get(key)
    if value is None:
        raise ConfigError(f"the saved state of {name} has no {key!r}")
    found = _tensor(value)
    if shape is not None and tuple(found.shape) != tuple(shape):
        raise ConfigError(
            f"the saved {key!r} of {name} has the shape {tuple(found.shape)}, "
            f"expected {tuple(shape)}"
        )
    return found
