"""The precision guard: the optimizer must read the persistent gradient buffer, never a copy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import PrecisionError

_NUM_NAMED = 3


@dataclass(frozen=True)
class OptimizerFacts:
    """What the guard has to know about an optimizer.

    Attributes:
        name: Its class, for messages.
        use_decoupled_grad: It reads ``param.decoupled_grad`` instead of ``param.grad``.
        main_weight_dtype: Gives the dtype of the weight that it updates for a parameter.
        mixed_gradients: It can step on a gradient whose dtype is not the parameter's.
        keeps_main_weights: It can be told to keep main weights of its own.
    """

    name: str
    use_decoupled_grad: bool
    main_weight_dtype: Callable[[Tensor], torch.dtype]
    mixed_gradients: bool
    keeps_main_weights: bool


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

    Args:
        named_params: Every trainable parameter by its full name.
        policy: Precision of main weights and main grads.
        facts: What the optimizer does.

    Raises:
        PrecisionError: two settings clash; the message has both, with their values, the first
            parameters that are concerned, and each way out.
    """
    if policy.use_decoupled_grad != facts.use_decoupled_grad:
        raise PrecisionError(_decoupling_message(policy, facts))
    _check_main_weights(named_params, policy, facts)
    if not facts.use_decoupled_grad:
        _check_equal_dtypes(named_params, policy, facts)
        if not facts.mixed_gradients:
            _check_own_gradients(named_params, policy, facts)


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


def _check_main_weights(
    named_params: Mapping[str, nn.Parameter],
    policy: MixedPrecisionPolicy,
    facts: OptimizerFacts,
) -> None:
    wanted = policy.main_params_dtype
    if wanted is None:
        return
    clashing = [
        (name, facts.main_weight_dtype(param))
        for name, param in named_params.items()
        if facts.main_weight_dtype(param) != wanted
    ]
    if not clashing:
        return
    ways = ["drop main_params_dtype from the policy", f"make the parameters {_short(wanted)}"]
    if facts.keeps_main_weights and wanted == torch.float32:
        ways.insert(0, "construct FusedAdam(..., master_weights=True)")
    raise PrecisionError(
        f"mp_policy.main_params_dtype is {_short(wanted)}, but {facts.name} updates weights in "
        f"{_short(clashing[0][1])}, for {_list_names([name for name, _ in clashing])}. "
        f"Ways out: {_numbered(ways)}"
    )


def _check_equal_dtypes(
    named_params: Mapping[str, nn.Parameter],
    policy: MixedPrecisionPolicy,
    facts: OptimizerFacts,
) -> None:
    clashing = [
        (name, main, grad)
        for name, param in named_params.items()
        for main in [main_param_dtype(param, policy, facts)]
        for grad in [main_grad_dtype(param, policy, facts)]
        if main != grad
    ]
    if not clashing:
        return
    _, main, grad = clashing[0]
    ways = [
        "read the gradient apart from the parameter: FusedAdam(..., use_decoupled_grad=True) "
        "with MixedPrecisionPolicy(use_decoupled_grad=True, ...)",
        f"equal dtypes: main_grads_dtype={_short(main)}, or main_params_dtype={_short(grad)} "
        "with main weights of that dtype",
        "drop main_grads_dtype: the main grads then have the dtype of the main weights",
    ]
    origin = (
        "mp_policy.main_params_dtype"
        if policy.main_params_dtype is not None
        else f"main_params_dtype (not set: what {facts.name} updates)"
    )
    raise PrecisionError(
        f"{origin} is {_short(main)} and mp_policy.main_grads_dtype is {_short(grad)}, so the "
        f"optimizer would read a casted copy of the gradient, not the persistent buffer, for "
        f"{_list_names([name for name, _, _ in clashing])}. Ways out: {_numbered(ways)}"
    )


def _check_own_gradients(
    named_params: Mapping[str, nn.Parameter],
    policy: MixedPrecisionPolicy,
    facts: OptimizerFacts,
) -> None:
    clashing = [
        (name, param.dtype, main_grad_dtype(param, policy, facts))
        for name, param in named_params.items()
        if param.dtype != main_grad_dtype(param, policy, facts)
    ]
    if not clashing:
        return
    _, own, grad = clashing[0]
    ways = [
        "use graphfsdp.optim.FusedAdam, which takes any float dtypes",
        f"main_grads_dtype={_short(own)}",
        "drop the dtypes from the policy",
    ]
    raise PrecisionError(
        f"the main grads are {_short(grad)} (mp_policy.main_grads_dtype is "
        f"{_short(policy.main_grads_dtype)}, main_params_dtype is "
        f"{_short(policy.main_params_dtype)}), but {facts.name} needs gradients of the "
        f"parameter's dtype, {_short(own)}, for {_list_names([name for name, _, _ in clashing])}. "
        f"Ways out: {_numbered(ways)}"
    )


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _list_names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"


def _numbered(ways: list[str]) -> str:
    return "; ".join(f"({number}) {way}" for number, way in enumerate(ways, start=1))
