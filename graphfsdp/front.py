"""`graphfsdp.capture`: checks the arguments and joins the legs into a captured step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphfsdp._capture.choose_backend import make_backend
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.iteration import default_loss
from graphfsdp._capture.step import CapturedStep
from graphfsdp.capture_hook import answerable
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, OnChange, Scope
from graphfsdp.optim.backends import adapt
from graphfsdp.preconditions import (
    adopt_sharded_parameters,
    inner_optimizer,
    only_device,
    precision_of,
    refuse_clipping_of_scaled_gradients,
    refuse_other_types,
    trainable_parameters,
)
from graphfsdp.wrapped import refuse_parallel_wrapper


@answerable
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
    verify: int = 0,
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
        verify: Compare this many replays of each graph with an eager run from the same state, bit
            for bit; see ``CapturedStep.verify``.
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
        verify=verify,
    )
    optimizer = inner_optimizer(optimizer)
    refuse_other_types(model, loss_fn, mp_policy)
    if options.scope is not Scope.NONE:
        refuse_parallel_wrapper(model)
    adopt_sharded_parameters(model, optimizer)
    named_params = trainable_parameters(model, optimizer)
    graph_backend = make_backend(backend, only_device(model, named_params))
    adapted = adapt(optimizer)
    policy = precision_of(model, adapted, mp_policy)

    def find_params() -> dict[str, nn.Parameter]:
        found = trainable_parameters(model, optimizer)
        adapted.check(found, policy, options.scope)
        return found

    refuse_clipping_of_scaled_gradients(optimizer, options)
    engine = Engine(
        model,
        adapted,
        graph_backend,
        find_params=find_params,
        loss_fn=loss_fn or default_loss,
        policy=policy,
        options=options,
    )
    return CapturedStep(engine, options)


__all__ = ["capture"]
