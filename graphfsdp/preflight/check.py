"""`graphfsdp.check`: runs one iteration under the rules of a capture and changes nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphfsdp._capture.choose_backend import make_backend
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards.hooks import users_hooks
from graphfsdp._capture.guards.moves import Before, refuse_deciding, refuse_draws, tell_of
from graphfsdp._capture.guards.names import ReadNames
from graphfsdp._capture.guards.walk import walk
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.iteration import AnyIteration, CustomIteration, Iteration, default_loss
from graphfsdp._capture.trace.ran import Ran
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp._capture.undo.host_state import Attempt
from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog
from graphfsdp.base.recomputation import torchs_checkpoints_as_ours
from graphfsdp.base.sharded import main_grads_of, pipeline_stages
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import CaptureError, ConfigError, PrecisionError, split_remedy
from graphfsdp.optim.adapters.backends import JointOptimizer, adapt
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.preconditions import (
    adopt_sharded_parameters,
    as_list,
    inner_optimizer,
    one_module,
    only_device,
    precision_of,
    refuse_beside_iteration,
    refuse_offloaded_shards,
    refuse_other_types,
    refuse_parallel_wrapper,
    refuse_several,
    refuse_unreduced_parameters,
    refuse_unskipped_steps,
    trainable_of_all,
)
from graphfsdp.preflight.rehearsal import Rehearsal
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.untouched import untouched

_TARGETS = ("cuda", "cpu")
# After these, runs of the iteration are no more alike, or there is none.
_TOLD = frozenset(
    {
        *(HazardKind.BAKED_NUMBER, HazardKind.CONTROL_FLOW, HazardKind.EXCEPTION),
        *(HazardKind.STATE, HazardKind.LOSS, HazardKind.CONFIG, HazardKind.GENERATOR),
        *(HazardKind.HIDDEN_WRITE, HazardKind.THREAD),
    }
)
_MakeIteration = Callable[[CapturableOptimizer, PersistentGradients], AnyIteration]


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
    """Do what ``check`` does, for a batch whose keyword arguments may have any names."""
    options = CaptureOptions(
        scope=Scope.parse(scope), microbatches=microbatches, max_grad_norm=max_grad_norm
    )
    if pipeline_stages(model):
        raise ConfigError(
            f"check runs an iteration of one process, and a {type(model).__name__} runs on all "
            "ranks of a pipeline. Remedy: check a stage's module with a loss of its own; or "
            "capture the schedule, which names the same and leaves everything as it was"
        )
    together = one_module(model)
    unwrapped = [unwrap(item) for item in as_list(optimizer, "optimizer")]
    inner = [item for item, _ in unwrapped]
    refuse_other_types(loss_fn, mp_policy)
    if target not in _TARGETS:
        raise ConfigError(f"unknown target {target!r}; expected one of {_TARGETS}")
    ignored = {_kind(kind) for kind in ignore}
    if iteration is None:
        refuse_several(model, optimizer)
    else:
        refuse_beside_iteration(iteration, options)
        refuse_unskipped_steps(together, inner, options)

    def make_iteration(
        adapted: CapturableOptimizer, gradients: PersistentGradients
    ) -> AnyIteration:
        loss = loss_fn or default_loss
        if iteration is not None:
            return CustomIteration(
                iteration,
                model,
                optimizer,
                gradients,
                loss_fn=loss,
                module=together,
                stepping=adapted.stepping,
            )
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


def unwrap(optimizer: object) -> tuple[torch.optim.Optimizer, ConfigError | None]:
    """Return the optimizer without its wrapper, and what is wrong with that."""
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


@dataclass(frozen=True)
class Settings:
    """What an iteration is recorded with; ``steps``: the optimizers' step, too."""

    named_params: dict[str, nn.Parameter]
    device: torch.device
    adapted: CapturableOptimizer
    policy: MixedPrecisionPolicy
    steps: bool


@dataclass
class Preflight:
    """``device`` is "?" for a model on several; ``num_ops`` counts those of the judged run."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    make_iteration: _MakeIteration
    options: CaptureOptions
    mp_policy: MixedPrecisionPolicy | None
    target: str
    hazards: HazardLog = field(default_factory=HazardLog)
    device: str = "?"
    num_ops: int = 0

    def run(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the iteration on a batch, and note all that a graph of it could not hold."""
        with self._noting(HazardKind.CONFIG):  # what leaves nothing to go on with
            self._run(batch, kwargs)

    def settings(self, before: "Settings | None" = None) -> "Settings":
        """Note what is wrong with model and optimizers by themselves.

        ``before``: of the same ones, whose adapters have seen them step. ConfigError: it leaves
        nothing to go on with.
        """
        refuse_parallel_wrapper(self.model)
        refuse_offloaded_shards(self.model)
        for optimizer in self.optimizers:
            adopt_sharded_parameters(self.model, optimizer)
        named_params = trainable_of_all(self.model, self.optimizers)
        device = only_device(self.model, named_params)
        make_backend("auto", device)  # which refuses other devices
        with self._noting(HazardKind.CONFIG):
            refuse_unreduced_parameters(self.model, named_params)
        adapted, steps = self._adapt() if before is None else (before.adapted, before.steps)
        policy = self._policy(adapted)
        scope = Scope.FULL_ITERATION if self.options.scope is Scope.NONE else self.options.scope
        try:
            adapted.check(named_params, policy, scope)
        except PrecisionError as error:
            self.note(error, HazardKind.PRECISION)
        except ConfigError as error:
            self.note(error, HazardKind.OPTIMIZER)
            steps = False  # what it does wrong has been said
        self.device = str(device)
        steps = steps and scope is Scope.FULL_ITERATION
        return Settings(named_params, device, adapted, policy, steps)

    def _run(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        settings = self.settings()
        adapted, steps, policy = settings.adapted, settings.steps, settings.policy
        named_params, device = settings.named_params, settings.device
        backend = make_backend("auto", device)
        with self._noting(HazardKind.PRECISION), ExitStack() as stack:
            gradients = PersistentGradients(
                named_params,
                dtype_of=lambda param: adapted.main_grad_dtype(param, policy),
                use_decoupled_grad=adapted.use_decoupled_grad,
                sharded=main_grads_of(self.model),
            )
            stack.callback(gradients.close)
            with self._noting(HazardKind.CONFIG), backend.on_capture_stream():
                inputs = StaticInputs(
                    batch, kwargs, device=device, num_microbatches=self.options.microbatches
                )
                iteration = self.make_iteration(adapted, gradients)

                def iterate() -> None:
                    with torchs_checkpoints_as_ours():
                        iteration.forward_backward(inputs, self.options.microbatches)
                    if steps:
                        iteration.optimizer_step()

                for_cuda = self.target == "cuda"
                rehearsal = Rehearsal(
                    self.model, self.optimizers, gradients, self.hazards, device, for_cuda, adapted
                )
                self.num_ops = rehearsal.run(iterate)
                functions = (
                    *iteration.functions,
                    *users_hooks(self.model, named_params, self.optimizers),
                )
                attempt = Attempt(
                    self.model,
                    self.optimizers,
                    CopyOnWrite(),
                    device=device,
                    restore_gradients=gradients.save_bindings(),
                )
                self._note_moves(iterate, attempt, functions)
        members = adapted.members if isinstance(adapted, JointOptimizer) else [adapted]
        for adapter in members if steps else ():
            if isinstance(adapter, BakedAdapter) and adapter.bakes_lr:
                self._note_baked_lr(adapter.optimizer)

    def _note_moves(
        self, iterate: Callable[[], None], attempt: Attempt, functions: Sequence[Callable[..., Any]]
    ) -> None:
        """Note what the iteration moves in Python, and draws from there."""
        if {hazard.kind for hazard in self.hazards} & _TOLD:
            return  # what differs from run to run by itself
        ran = Ran()
        with attempt.undone(), ran.noting():
            iterate()
        names = ReadNames(ran)
        before = Before(walk(names, self.model, functions))
        with attempt.undone():
            iterate()
        moves = before.moves_to(walk(names, self.model, functions))
        try:
            refuse_draws(before, ran)
            refuse_deciding(moves, ran)
        except CaptureError as error:
            self.hazards.add(error.hazard)
        else:
            tell_of(list(map(str, moves)))

    def _adapt(self) -> tuple[CapturableOptimizer, bool]:
        members: list[CapturableOptimizer] = []
        steps = True
        for optimizer in self.optimizers:
            try:
                members.append(adapt(optimizer))
            except ConfigError as error:
                self.note(error, HazardKind.OPTIMIZER)
                members.append(BakedAdapter(optimizer))
                steps = False
        return members[0] if len(members) == 1 else JointOptimizer(members), steps

    def _policy(self, adapted: CapturableOptimizer) -> MixedPrecisionPolicy:
        try:
            return precision_of(self.model, adapted, self.mp_policy)
        except PrecisionError as error:
            self.note(error, HazardKind.PRECISION)
            return MixedPrecisionPolicy(use_decoupled_grad=adapted.use_decoupled_grad)

    def _note_baked_lr(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
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
        """Note an error as a hazard."""
        why, fix = split_remedy(str(error))
        self.hazards.add(Hazard(kind, why, fix))

    @contextmanager
    def _noting(self, kind: HazardKind) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.note(error, HazardKind.PRECISION if isinstance(error, PrecisionError) else kind)
