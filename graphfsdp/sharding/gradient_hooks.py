"""Hooks of gradients on sharded parameters: which are called, and those that nobody would call."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from graphfsdp.errors import ConfigError

_Hooks = Mapping[int, Callable[..., Tensor | None]]


def has_hooks(param: nn.Parameter) -> bool:
    """Tell whether there are hooks of the user's."""
    behind: _Hooks = param._post_accumulate_grad_hooks or {}
    ours = sum(isinstance(hook, _PastTheUnit) for hook in behind.values())
    return bool(param._backward_hooks) or len(behind) > ours


def change(param: nn.Parameter, grad: Tensor) -> None:
    """Let hooks of ``register_hook`` change a gradient in place, whatever they return."""
    hooks: _Hooks = param._backward_hooks or {}
    for hook in [*hooks.values()]:
        other = hook(grad)
        if other is not None:
            grad.copy_(other)


def call_when_bound(param: nn.Parameter) -> None:
    """Call hooks of ``register_post_accumulate_grad_hook``; they may step and take it off."""
    hooks: _Hooks = param._post_accumulate_grad_hooks or {}
    for hook in [*hooks.values()]:
        if not isinstance(hook, _PastTheUnit):
            hook(param)


def watch_gradient(param: nn.Parameter, name: str) -> None:
    """Refuse gradients that reach a sharded parameter past its unit."""
    hooks = param._post_accumulate_grad_hooks
    if hooks:
        # torch.utils.swap_tensors has brought the list along, but not what makes autograd call it.
        param._post_accumulate_grad_hooks = hooks
    if param.requires_grad and not is_watched(param):
        param.register_post_accumulate_grad_hook(_PastTheUnit(name))


def is_watched(param: nn.Parameter) -> bool:
    hooks: Mapping[int, object] = param._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, _PastTheUnit) for hook in hooks.values())


def refuse_gradient_hooks(param: nn.Parameter, name: str) -> None:
    """Refuse hooks of a whole parameter, whose gradients will be shards."""
    if param._post_accumulate_grad_hooks or param._backward_hooks:
        raise ConfigError(
            f"parameter {name!r} has a hook of its gradient (register_hook or "
            "register_post_accumulate_grad_hook), and fully_shard puts another parameter in its "
            "place, whose gradients are shards. Remedy: register the hook after fully_shard"
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
