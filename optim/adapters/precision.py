"""The precision guard: the optimizer must read the persistent gradient buffer, never a copy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import PrecisionError

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NUM_NAMED = 3


def _own_dtype(param: Tensor) -> torch.dtype:
    return param.dtype


def is_quantised(param: Tensor) -> bool:
    """Whether 8-bit numbers are all there is of it, also where its class hides their dtype."""
    local = local_part(param)
    # Transformer Engine's parameters have their quantiser with them.
    return local.dtype in _FLOAT8 or hasattr(local, "_quantizer")


@dataclass(frozen=True)
class OptimizerFacts:
    name: str  # its class, for messages
    use_decoupled_grad: bool = False
    main_weight_dtype: Callable[[Tensor], torch.dtype] = _own_dtype  # of the weight it updates
    keeps_main_weights: bool = False  # it can be told to keep main weights of its own


def main_param_dtype(
    param: Tensor, policy: MixedPrecisionPolicy, facts: OptimizerFacts
) -> torch.dtype:
    """Return the dtype of the main weight: the policy's, or that of the updated weight."""
    return policy.main_params_dtype or facts.main_weight_dtype(param)


def main_grad_dtype(
    param: Tensor, policy: MixedPrecisionPolicy, facts: OptimizerFacts
) -> torch.dtype:
    """Return the dtype of the persistent gradient: the policy's, or the main weight's."""
    return policy.main_grads_dtype or main_param_dtype(param, policy, facts)


def check_precision(
    named_params: Mapping[str, nn.Parameter],
    policy: MixedPrecisionPolicy,
    facts: OptimizerFacts,
) -> None:
    """Refuse settings with which the optimizer would read a casted copy of a gradient.

    A cast makes a new tensor: it is no view of the persistent buffer, costs a pass over memory in
    each iteration, and is what a graph would go on reading while the buffer gets new values.
    """
    if policy.use_decoupled_grad != facts.use_decoupled_grad:
        raise PrecisionError(_decoupling_message(policy, facts))
    quantised = [name for name, p in named_params.items() if p.requires_grad and is_quantised(p)]
    if quantised:
        raise PrecisionError(
            f"{facts.name} cannot step on parameters that are 8-bit numbers themselves, as "
            f"{_list_names(quantised)}: a step is smaller than the distance of 8-bit numbers, so "
            "there must be a main weight. Remedy: parameters in float32 or bfloat16, which "
            "gather_format, or layers of torchao, quantise where they are used"
        )
    updated = {name: facts.main_weight_dtype(param) for name, param in named_params.items()}
    main = {name: main_param_dtype(param, policy, facts) for name, param in named_params.items()}
    grads = {name: main_grad_dtype(param, policy, facts) for name, param in named_params.items()}
    clash = _clash(updated, main)
    if clash is not None:
        raise PrecisionError(_main_weights_message(facts, *clash))
    clash = None if facts.use_decoupled_grad else _clash(main, grads)
    if clash is not None:
        raise PrecisionError(_casted_copy_message(policy, facts, *clash))


def _clash(
    left: Mapping[str, torch.dtype], right: Mapping[str, torch.dtype]
) -> tuple[str, str, str] | None:
    """Return two dtypes that must be equal and are not, and the parameters where it is so."""
    names = [name for name, dtype in left.items() if dtype != right[name]]
    if not names:
        return None
    return _short(left[names[0]]), _short(right[names[0]]), _list_names(names)


def _decoupling_message(policy: MixedPrecisionPolicy, facts: OptimizerFacts) -> str:
    read = "param.decoupled_grad" if facts.use_decoupled_grad else "param.grad"
    if policy.use_decoupled_grad:
        ways = (
            f"construct FusedAdam(..., use_decoupled_grad=True) in place of {facts.name}, or drop "
            "use_decoupled_grad from the policy"
        )
    else:
        ways = (
            "set MixedPrecisionPolicy(use_decoupled_grad=True), or construct the optimizer "
            "without use_decoupled_grad"
        )
    return (
        f"mp_policy.use_decoupled_grad is {policy.use_decoupled_grad}, but {facts.name} reads "
        f"{read}: the gradients would be bound where the optimizer does not look. Ways out: {ways}"
    )


def _main_weights_message(facts: OptimizerFacts, left: str, right: str, names: str) -> str:
    ways = ["drop main_params_dtype from the policy", f"make the parameters {right}"]
    if facts.keeps_main_weights and right == "float32":
        ways.insert(0, "construct FusedAdam(..., master_weights=True)")
    return (
        f"mp_policy.main_params_dtype is {right}, but {facts.name} updates weights in {left}, for "
        f"{names}. Ways out: {_numbered(ways)}"
    )


def _casted_copy_message(
    policy: MixedPrecisionPolicy, facts: OptimizerFacts, left: str, right: str, names: str
) -> str:
    ways = [
        "read the gradient apart from the parameter: FusedAdam(..., use_decoupled_grad=True) with "
        "MixedPrecisionPolicy(use_decoupled_grad=True, ...)",
        f"equal dtypes: main_grads_dtype={left}, or main_params_dtype={right} with main weights of "
        "that dtype",
        "drop main_grads_dtype: the main grads then have the dtype of the main weights",
    ]
    origin = "mp_policy.main_params_dtype"
    if policy.main_params_dtype is None:
        origin = f"main_params_dtype (not set: what {facts.name} updates)"
    return (
        f"{origin} is {left} and mp_policy.main_grads_dtype is {right}, so the optimizer would "
        "read a casted copy of the gradient, not the persistent buffer, for "
        f"{names}. Ways out: {_numbered(ways)}"
    )


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _list_names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"


def _numbered(ways: list[str]) -> str:
    return "; ".join(f"({number}) {way}" for number, way in enumerate(ways, start=1))
