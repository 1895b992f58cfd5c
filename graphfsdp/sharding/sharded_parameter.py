"""The parameter that takes the place of a whole one, and what may not be done to its gradient.

Note [Gradients of shards]: gradients of a unit's weights come whole, from an autograd function of
its own, and are reduced into the main grads; autograd never accumulates into the sharded parameter.
So hooks of gradients would not be called, and a gradient that reaches the parameter on another way
would be overwritten. Both are errors.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphfsdp.errors import ConfigError

# On a parameter that a unit manages.
IS_SHARDED = "_graphfsdp_is_sharded"


def replacement(param: nn.Parameter, view: Tensor, name: str) -> nn.Parameter:
    """Return the parameter that takes the place of a whole one, with all its attributes.

    Args:
        param: The whole one; its memory is given up.
        view: What the new one is.
        name: For messages.
    """
    sharded = nn.Parameter(view, requires_grad=param.requires_grad)
    for attribute, value in vars(param).items():
        setattr(sharded, attribute, value)
    setattr(sharded, IS_SHARDED, True)
    watch_gradient(sharded, name)
    # Whoever still holds the whole parameter (an optimizer made before) must not keep its memory,
    # nor go on training a copy that nobody uses.
    param.grad = None
    if isinstance(param, DTensor):
        param._local_tensor = param._local_tensor.new_empty(0)
    elif not param.is_meta:  # which has none, and is still asked for its shape
        param.data = param.data.new_empty(0)
    return sharded


def watch_gradient(param: nn.Parameter, name: str) -> None:
    """Refuse gradients that reach a sharded parameter past its unit."""
    hooks = param._post_accumulate_grad_hooks
    if hooks:
        # torch.utils.swap_tensors has brought the list along, but not what makes autograd call it.
        param._post_accumulate_grad_hooks = hooks
    elif param.requires_grad:
        param.register_post_accumulate_grad_hook(_PastTheUnit(name))


def refuse_gradient_hooks(param: nn.Parameter, name: Callable[[], str]) -> None:
    """Refuse hooks that would not be called.

    Args:
        param: A whole parameter, or a sharded one.
        name: Tells its name.

    Raises:
        ConfigError: somebody has registered one.
    """
    hooks = param._post_accumulate_grad_hooks
    ours = not hooks or all(isinstance(hook, _PastTheUnit) for hook in hooks.values())
    if ours and not param._backward_hooks:
        return
    raise ConfigError(
        f"parameter {name()!r} has a hook of its gradient (register_hook or "
        "register_post_accumulate_grad_hook), which fully_shard would never call: gradients of "
        "its parameters are reduced, not accumulated. Remedy: remove the hook, and change .grad "
        "between backward() and optimizer.step(); or a hook on what a module returns"
    )


class _PastTheUnit:
    """A hook that is called only where autograd accumulates into a sharded parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, param: Tensor) -> None:
        raise ConfigError(
            f"a gradient has reached the sharded parameter {self._name!r} itself, past the forward "
            "pass of its unit: the loss uses model.parameters() (a penalty on weights, say), and "
            "what it adds would be lost, since only gradients from the forward pass are reduced. "
            "Remedy: weight_decay for an L2 penalty; a penalty that the module computes of its "
            "weight in its own forward; or add to .grad between backward() and optimizer.step()"
        )
