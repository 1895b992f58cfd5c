"""`graphfsdp.check`: runs one iteration under the rules of a capture and changes nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from graphfsdp._capture.custom_iteration import CustomIteration
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.iteration import AnyIteration, Iteration, default_loss
from graphfsdp._capture.rules.untouched import untouched
from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.hazards import HazardKind
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError
from graphfsdp.preconditions import (
    as_list,
    inner_optimizer,
    one_module,
    refuse_beside_iteration,
    refuse_other_types,
    refuse_several,
)
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.run import Preflight

_TARGETS = ("cuda", "cpu")


def check(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    iteration: Callable[..., Any] | None = None,
    scope: str | Scope = "full_iteration",
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    target: str = "cuda",
    ignore: Iterable[HazardKind | str] = (),
    **kwargs: Any,
) -> CheckReport:
    """Run one iteration under the rules of a capture, and report everything a graph cannot hold.

    The iteration runs for real, where the model lies, and what would be refused is noted and
    allowed, so that one call finds all of it. Afterwards everything is as it was, bit for bit:
    parameters, buffers, gradients, optimizer state, ``param_groups``, modes, and the generators
    of torch, Python and NumPy. (What the iteration does to other Python objects, and to memory by
    no operator, is not undone.) To find numbers that change in Python, the iteration is run
    several times from the same state.

    Args:
        model: As for ``capture``.
        optimizer: As for ``capture``.
        *batch: Positional arguments of one call of the captured step.
        loss_fn: As for ``capture``.
        iteration: As for ``capture``.
        scope: As for ``capture``; "none" is checked like "full_iteration".
        microbatches: As for ``capture``.
        max_grad_norm: As for ``capture``.
        mp_policy: As for ``capture``.
        target: "cuda" also reports what only a GPU would refuse, so that a machine without one
            can gate a GPU's training script; "cpu" reports what the CPU backend refuses.
        ignore: Kinds of hazards to leave out, such as "gradient".
        **kwargs: Keyword arguments of one call of the captured step.

    Returns:
        The hazards; ``report.ok`` if there are none.

    Raises:
        ConfigError: an argument is of another type, or no such target or kind exists.
    """
    return check_call(
        model,
        optimizer,
        batch,
        kwargs,
        loss_fn=loss_fn,
        iteration=iteration,
        scope=scope,
        microbatches=microbatches,
        max_grad_norm=max_grad_norm,
        mp_policy=mp_policy,
        target=target,
        ignore=ignore,
    )


def check_call(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
    iteration: Callable[..., Any] | None = None,
    scope: str | Scope = "full_iteration",
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    target: str = "cuda",
    ignore: Iterable[HazardKind | str] = (),
) -> CheckReport:
    """Do what ``check`` does, for a batch whose keywords may be any.

    Args:
        model: As for ``check``.
        optimizer: As for ``check``.
        args: Positional arguments of one call of the captured step.
        kwargs: Its keyword arguments.
        loss_fn: As for ``check``, like the rest.
        iteration: Likewise.
        scope: Likewise.
        microbatches: Likewise.
        max_grad_norm: Likewise.
        mp_policy: Likewise.
        target: Likewise.
        ignore: Likewise.

    Returns:
        The hazards.

    Raises:
        ConfigError: as for ``check``.
    """
    options = CaptureOptions(
        scope=Scope.parse(scope), microbatches=microbatches, max_grad_norm=max_grad_norm
    )
    together = one_module(model)
    unwrapped = [_unwrap(item) for item in as_list(optimizer, "optimizer")]
    inner = [item for item, _ in unwrapped]
    refuse_other_types(together, loss_fn, mp_policy)
    if target not in _TARGETS:
        raise ConfigError(f"unknown target {target!r}; expected one of {_TARGETS}")
    ignored = {_kind(kind) for kind in ignore}
    if iteration is None:
        refuse_several(model, optimizer)
    else:
        refuse_beside_iteration(iteration, options)

    def make_iteration(
        adapted: CapturableOptimizer, gradients: PersistentGradients
    ) -> AnyIteration:
        loss = loss_fn or default_loss
        if iteration is not None:
            return CustomIteration(iteration, model, optimizer, gradients, loss_fn=loss)
        return Iteration(
            together, adapted, gradients, loss_fn=loss, max_grad_norm=options.max_grad_norm
        )

    flight = Preflight(together, inner, make_iteration, options, mp_policy, target)
    for _, wrapper_error in unwrapped:
        if wrapper_error is not None:
            flight.note(wrapper_error, HazardKind.OPTIMIZER)
    with ExitStack() as stack:
        for item in inner:
            stack.enter_context(untouched(together, item))
        flight.run(args, dict(kwargs))
    found = tuple(flight.hazards)
    kept = tuple(hazard for hazard in found if hazard.kind not in ignored)
    return CheckReport(kept, flight.device, target, flight.num_ops, len(found) - len(kept))


def _unwrap(optimizer: object) -> tuple[torch.optim.Optimizer, ConfigError | None]:
    try:
        return inner_optimizer(optimizer), None
    except ConfigError as error:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise
        return inner, error


def _kind(name: HazardKind | str) -> HazardKind:
    try:
        return HazardKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in HazardKind)
        raise ConfigError(f"unknown kind of hazard {name!r}; expected one of {known}") from None
