"""`graphfsdp.check`: runs one iteration under the rules of a capture and changes nothing."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from graphfsdp._capture.choose_backend import make_backend
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.iteration import Iteration, default_loss
from graphfsdp._capture.rehearsal import Rehearsal
from graphfsdp._capture.static_inputs import StaticInputs
from graphfsdp._capture.untouched import untouched
from graphfsdp.capturable import CapturableOptimizer
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, PrecisionError, split_remedy
from graphfsdp.hazards import Hazard, HazardKind, HazardLog
from graphfsdp.optim.backends import BakedAdapter, adapt
from graphfsdp.preconditions import (
    adopt_sharded_parameters,
    inner_optimizer,
    only_device,
    precision_of,
    refuse_clipping_of_scaled_gradients,
    refuse_other_types,
    trainable_parameters,
)
from graphfsdp.preflight_report import CheckReport
from graphfsdp.sharded import main_grads_of
from graphfsdp.wrapped import refuse_parallel_wrapper

_TARGETS = ("cuda", "cpu")


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *batch: Any,
    loss_fn: Callable[..., Any] | None = None,
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
        scope=scope,
        microbatches=microbatches,
        max_grad_norm=max_grad_norm,
        mp_policy=mp_policy,
        target=target,
        ignore=ignore,
    )


def check_call(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
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
    inner, wrapper_error = _unwrap(optimizer)
    refuse_other_types(model, loss_fn, mp_policy)
    if target not in _TARGETS:
        raise ConfigError(f"unknown target {target!r}; expected one of {_TARGETS}")
    ignored = {_kind(kind) for kind in ignore}
    flight = _Preflight(model, inner, loss_fn or default_loss, options, mp_policy, target)
    if wrapper_error is not None:
        flight.note(wrapper_error, HazardKind.OPTIMIZER)
    with untouched(model, inner):
        flight.run(args, dict(kwargs))
    found = tuple(flight.hazards)
    kept = tuple(hazard for hazard in found if hazard.kind not in ignored)
    return CheckReport(kept, flight.device, target, flight.num_ops, len(found) - len(kept))


@dataclass
class _Setup:
    """What an iteration needs, and whether the optimizer can take part."""

    device: torch.device
    named_params: dict[str, nn.Parameter]
    adapted: CapturableOptimizer
    policy: MixedPrecisionPolicy
    steps: bool


class _Preflight:
    """One check.

    Attributes:
        hazards: What was found.
        device: Where the model lies, "?" if on several devices.
        num_ops: Operators of the judged run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any],
        options: CaptureOptions,
        mp_policy: MixedPrecisionPolicy | None,
        target: str,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._options = options
        self._mp_policy = mp_policy
        self._target = target
        self.hazards = HazardLog()
        self.device = "?"
        self.num_ops = 0

    def run(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        setup = self._settle()
        if setup is None:
            return
        self.device = str(setup.device)
        try:
            gradients = PersistentGradients(
                setup.named_params,
                dtype_of=lambda param: setup.adapted.main_grad_dtype(param, setup.policy),
                use_decoupled_grad=setup.adapted.use_decoupled_grad,
                sharded=main_grads_of(self._model),
            )
        except ConfigError as error:
            self.note(error, HazardKind.PRECISION)
            return
        try:
            inputs = StaticInputs(
                batch, kwargs, device=setup.device, num_microbatches=self._options.microbatches
            )
            self._rehearse(setup, gradients, inputs)
        except ConfigError as error:  # a batch that cannot be an input
            self.note(error, HazardKind.CONFIG)
        finally:
            gradients.close()

    def _rehearse(
        self, setup: _Setup, gradients: PersistentGradients, inputs: StaticInputs
    ) -> None:
        iteration = Iteration(
            self._model,
            setup.adapted,
            gradients,
            loss_fn=self._loss_fn,
            max_grad_norm=self._options.max_grad_norm,
        )

        def iterate() -> None:
            iteration.forward_backward(inputs, self._options.microbatches)
            if setup.steps:
                iteration.optimizer_step()

        rehearsal = Rehearsal(
            self._model,
            self._optimizer,
            gradients,
            self.hazards,
            device=setup.device,
            for_cuda=self._target == "cuda",
        )
        with make_backend("auto", setup.device).on_capture_stream():
            self.num_ops = rehearsal.run(iterate)

    def _settle(self) -> _Setup | None:
        """Check all settings; return None if the iteration cannot even be set up."""
        lazy = [
            n for n, p in self._model.named_parameters() if isinstance(p, UninitializedParameter)
        ]
        if lazy:
            message = f"parameter {lazy[0]!r} has no shape before the model has run once"
            self.note(ConfigError(f"{message}. Remedy: run it once"), HazardKind.CONFIG)
            return None
        try:
            refuse_parallel_wrapper(self._model)
            adopt_sharded_parameters(self._model, self._optimizer)
            named_params = trainable_parameters(self._model, self._optimizer)
            device = only_device(self._model, named_params)
            make_backend("auto", device)
        except ConfigError as error:
            self.note(error, HazardKind.CONFIG)
            return None
        adapted, steps = self._adapt()
        policy = self._policy(adapted)
        scope = Scope.FULL_ITERATION if self._options.scope is Scope.NONE else self._options.scope
        try:
            adapted.check(named_params, policy, scope)
        except PrecisionError as error:
            self.note(error, HazardKind.PRECISION)
        except ConfigError as error:
            self.note(error, HazardKind.OPTIMIZER)
            steps = False  # what it does wrong has been said
        try:
            refuse_clipping_of_scaled_gradients(self._optimizer, self._options)
        except ConfigError as error:
            self.note(error, HazardKind.CONFIG)
        steps = steps and scope is Scope.FULL_ITERATION
        if steps and isinstance(adapted, BakedAdapter):
            self._note_baked_lr()
        return _Setup(device, named_params, adapted, policy, steps)

    def _adapt(self) -> tuple[CapturableOptimizer, bool]:
        try:
            return adapt(self._optimizer), True
        except ConfigError as error:
            self.note(error, HazardKind.OPTIMIZER)
            return BakedAdapter(self._optimizer), False

    def _policy(self, adapted: CapturableOptimizer) -> MixedPrecisionPolicy:
        try:
            return precision_of(self._model, adapted, self._mp_policy)
        except PrecisionError as error:
            self.note(error, HazardKind.PRECISION)
            return MixedPrecisionPolicy(use_decoupled_grad=adapted.use_decoupled_grad)

    def _note_baked_lr(self) -> None:
        name = type(self._optimizer).__name__
        for index, group in enumerate(self._optimizer.param_groups):
            if isinstance(group.get("lr"), float | int):
                self.hazards.add(
                    Hazard(
                        HazardKind.BAKED_NUMBER,
                        f"lr={group['lr']} of group {index} of {name} is a Python number, which "
                        "the graph bakes in: a scheduler's first change of it would end in an "
                        "error before the replay",
                        "graphfsdp.optim.FusedAdam, all of whose numbers stay live, or an lr that "
                        "is a tensor on the parameters' device; if it never changes, ignore this",
                        op=f"{name}.param_groups[{index}]['lr']",
                    )
                )

    def note(self, error: ConfigError, kind: HazardKind) -> None:
        """Note what is wrong with a setting."""
        why, fix = split_remedy(str(error))
        self.hazards.add(Hazard(kind, why, fix))


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


__all__ = ["check", "check_call"]
