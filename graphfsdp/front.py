"""`graphfsdp.capture`: checks the arguments and joins the legs into a captured step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphfsdp._capture.choose_backend import make_backend
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.iteration import default_loss
from graphfsdp._capture.step import CapturedStep
from graphfsdp.capturable import CapturableOptimizer
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, OnChange, Scope
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim.backends import adapt
from graphfsdp.optim.device_optimizer import DeviceOptimizer
from graphfsdp.sharded import sharded_roots
from graphfsdp.wrapped import refuse_parallel_wrapper, unwrap_optimizer


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss_fn: Callable[..., Any] | None = None,
    scope: str | Scope = "full_iteration",
    warmup_steps: int = 3,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    on_change: str | OnChange = "raise",
    max_graphs: int = 16,
    backend: str = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
) -> CapturedStep:
    """Turn a model and its optimizer into a step that trains with one graph launch.

    Call it before the train loop. The first ``warmup_steps`` calls of the result train eagerly,
    the next one records the iteration (and trains too), every later call replays. After n calls
    the parameters are bit for bit those of n eager calls (``scope="none"``).

    From now on the step owns the gradients: every trainable parameter's ``.grad`` (or
    ``.decoupled_grad``) is a view of one persistent buffer, and ``zero_grad`` is not needed.

    Args:
        model: Any module, on one CPU or CUDA device.
        optimizer: FusedAdam, or a torch optimizer that can be captured.
        loss_fn: ``loss_fn(model, *args, **kwargs)`` returns the scalar loss, or ``(loss, aux)``
            with any nesting of tensors. Default: what the model returns, or its ``.loss``.
        scope: "full_iteration"; "forward_backward", which leaves any optimizer eager; or "none",
            the same code run eagerly, which is the reference.
        warmup_steps: Eager iterations before the capture, at least 1; each is a real training
            step on its batch.
        microbatches: Equal parts into which dim 0 of every tensor of the batch is split; their
            gradients are averaged, and one optimizer step follows.
        max_grad_norm: Clip the global gradient norm to this, on the device; ``inf`` only
            computes the norm.
        on_change: What to do with a batch that no graph was made for: "raise"; "recapture", a
            graph for each kind of batch, all in one memory pool; or "eager", run this call without
            a graph. A new kind runs eagerly once, and is captured when it comes again.
        max_graphs: Graphs that are kept at a time; the least recently used one goes first.
        backend: "auto" takes the model's device; "cuda" and "cpu" insist on it.
        mp_policy: Dtypes of main weights and main grads; default: as the optimizer keeps them.

    Returns:
        The step. Call it once per batch, ``close()`` it at the end.

    Raises:
        ConfigError: an argument, or a combination with the optimizer, cannot work.
        PrecisionError: the optimizer would read a casted copy of a gradient.
    """
    options = CaptureOptions(
        scope=Scope.parse(scope),
        warmup_steps=warmup_steps,
        microbatches=microbatches,
        max_grad_norm=max_grad_norm,
        on_change=OnChange.parse(on_change),
        max_graphs=max_graphs,
    )
    optimizer = _inner_optimizer(optimizer)
    _refuse_other_types(model, loss_fn, mp_policy)
    if options.scope is not Scope.NONE:
        refuse_parallel_wrapper(model)
    _adopt_sharded_parameters(model, optimizer)
    named_params = _trainable(model, optimizer)
    graph_backend = make_backend(backend, _only_device(model, named_params))
    adapted = adapt(optimizer)
    policy = _policy_of(model, adapted, mp_policy)
    adapted.check(named_params, policy, options.scope)
    _refuse_clipping_of_scaled_gradients(optimizer, options)
    engine = Engine(
        model,
        adapted,
        graph_backend,
        named_params=named_params,
        loss_fn=loss_fn or default_loss,
        policy=policy,
        options=options,
    )
    return CapturedStep(engine, options)


def _inner_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer without the wrapper that Accelerate or Fabric put around it.

    Raises:
        ConfigError: it is no optimizer.
    """
    inner = unwrap_optimizer(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return inner


def _refuse_other_types(model: object, loss_fn: object, mp_policy: object) -> None:
    """Check what a caller without a type checker may get wrong.

    Raises:
        ConfigError: an argument is of another type.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy must be a MixedPrecisionPolicy, got {type(mp_policy).__name__}"
        )


def _refuse_clipping_of_scaled_gradients(
    optimizer: torch.optim.Optimizer, options: CaptureOptions
) -> None:
    scaled = isinstance(optimizer, DeviceOptimizer) and optimizer.control.grad_scaler is not None
    if scaled and options.max_grad_norm is not None:
        raise ConfigError(
            f"max_grad_norm={options.max_grad_norm} of capture would measure gradients that the "
            "loss scale has multiplied. Remedy: FusedAdam(max_grad_norm=...), which unscales them "
            "first"
        )


def _policy_of(
    model: nn.Module, optimizer: CapturableOptimizer, given: MixedPrecisionPolicy | None
) -> MixedPrecisionPolicy:
    """Return the given policy, or the one that optimizer and sharding come to.

    Raises:
        PrecisionError: ``fully_shard`` puts gradients where nobody reads them, or has them in
            another dtype than the policy says.
    """
    policy = given or MixedPrecisionPolicy(use_decoupled_grad=optimizer.use_decoupled_grad)
    grads = [grad for root in sharded_roots(model) for grad in root.main_grads().values()]
    for grad in grads:
        if grad.decoupled != policy.use_decoupled_grad:
            who = "capture's mp_policy" if given else type(optimizer.optimizer).__name__
            raise PrecisionError(
                f"fully_shard has use_decoupled_grad={grad.decoupled} and so binds gradients to "
                f"{'decoupled_grad' if grad.decoupled else 'grad'}, but {who} has "
                f"use_decoupled_grad={policy.use_decoupled_grad}: nothing would be trained. Ways "
                "out: MixedPrecisionPolicy(use_decoupled_grad=...) for fully_shard as the "
                "optimizer has it, or FusedAdam(use_decoupled_grad=...) as fully_shard has it"
            )
        if policy.main_grads_dtype not in (None, grad.view.dtype):
            raise PrecisionError(
                f"fully_shard has main grads in {grad.view.dtype}, but capture's mp_policy says "
                f"main_grads_dtype={policy.main_grads_dtype}. Remedy: leave mp_policy out, or "
                "give both the same"
            )
    dtypes = {grad.view.dtype for grad in grads}
    if given is None and len(dtypes) == 1:
        return dataclasses.replace(policy, main_grads_dtype=dtypes.pop())
    return policy


def _adopt_sharded_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that was made before ``fully_shard`` the parameters that it made.

    Raises:
        ConfigError: the optimizer has stepped already, so its state is that of whole parameters.
    """
    replaced: dict[int, nn.Parameter] = {}
    for root in sharded_roots(model):
        replaced.update(root.replaced_parameters())
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in replaced and param in optimizer.state:
                raise ConfigError(
                    "the optimizer has stepped before fully_shard was called; its state belongs "
                    "to whole parameters. Remedy: call fully_shard before the first step"
                )
        group["params"] = [replaced.get(id(param), param) for param in group["params"]]


def _trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of the model, and the optimizer's own, each once."""
    found = {name: param for name, param in model.named_parameters() if param.requires_grad}
    known = {id(param) for param in model.parameters()}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if id(param) not in known and param.requires_grad:
                found[f"optimizer.param_groups[{group_index}]['params'][{index}]"] = param
    if not found:
        raise ConfigError(
            "there is nothing to train: no parameter of the model or optimizer requires a "
            "gradient. Remedy: requires_grad_(True) on what is to be trained"
        )
    return found


def _only_device(model: nn.Module, named_params: dict[str, nn.Parameter]) -> torch.device:
    named = {**named_params, **dict(model.named_parameters()), **dict(model.named_buffers())}
    first: dict[torch.device, str] = {}
    for name, tensor in named.items():
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ConfigError(
            f"one graph lies on one device, but the model has {where}. Remedy: model.to(device)"
        )
    return next(iter(first))


__all__ = ["capture"]
