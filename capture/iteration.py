"""The Python that is captured: forward, backward, norm, clip and step, or the user's own."""

import abc
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.rules.functions import without_looks
from graphfsdp._capture.trace.source import definition_of
from graphfsdp._capture.undo.interrupts import interruptible
from graphfsdp.base.capturable import CapturableOptimizer, IterationPart
from graphfsdp.base.dtensors import RankGroups, num_meshes
from graphfsdp.base.hazards import SourceLine
from graphfsdp.base.norms import clip_coefficient, global_norm
from graphfsdp.base.sharded import sharded_roots
from graphfsdp.base.streams import nvtx_range
from graphfsdp.base.torch_internals import tree_leaves, tree_map, tree_structure, tree_unflatten
from graphfsdp.errors import ConfigError, InvalidLossError

LossFunction = Callable[..., Any]


def default_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what the model returns, or its ``.loss`` where the output has one."""
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


class AnyIteration(abc.ABC):
    """Something that trains once over static inputs, and can be recorded while it does.

    The same Python runs eagerly and recorded.

    Attributes:
        steps_inside: ``forward_backward`` steps the optimizer, too.
        functions: The user's functions that it runs.
        groups: The ranks of a pipeline, which have other parts of the model; none without one.
    """

    steps_inside: bool
    functions: tuple[Callable[..., Any], ...]
    groups: RankGroups = ()

    def __init__(
        self,
        models: Any,
        gradients: PersistentGradients,
        loss_fn: LossFunction,
        module: nn.Module,
    ) -> None:
        """``module`` holds all models."""
        self._models = models
        self._gradients = gradients
        self._loss_fn = loss_fn
        self._parts = [part for part in module.modules() if isinstance(part, IterationPart)]

    def prepare(self, inputs: StaticInputs, *, trains: bool) -> None:  # noqa: B027 (an option)
        """Do what comes once, before the first iteration of a kind, and is no part of it."""

    @abc.abstractmethod
    def forward_backward(self, inputs: StaticInputs, num_microbatches: int) -> Any:
        """Run forward and backward; return the results, detached."""

    @abc.abstractmethod
    def optimizer_step(self) -> Tensor | None:
        """Step; return the norm of the gradients before clipping, if it is wanted."""

    def forward(self, inputs: StaticInputs, num_microbatches: int) -> Any:
        """Run the forward pass without gradients; merge the microbatches' results as in training.

        Capture: no host sync.
        """
        outputs = []
        with torch.no_grad(), nvtx_range("forward"), without_looks():
            clear_autocast_cache()
            for index in range(num_microbatches):
                args, kwargs = inputs.hand_out(index, num_microbatches)
                with interruptible():
                    output = self._loss_fn(self._models, *args, **kwargs)
                _check_tensors(output, "loss_fn returned", self._loss_source())
                outputs.append(tree_map(own, output))
        return outputs[0] if len(outputs) == 1 else merge(outputs)

    def _end(self) -> None:
        self._gradients.finish()
        with torch.no_grad():
            for part in self._parts:
                part.end_iteration()

    def _loss_source(self) -> SourceLine | None:
        is_own = self._loss_fn is not default_loss
        return definition_of(self._loss_fn if is_own else self._models)


class Iteration(AnyIteration):
    """Forward, backward, norm, clip and step."""

    steps_inside = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: CapturableOptimizer,
        gradients: PersistentGradients,
        *,
        loss_fn: LossFunction,
        max_grad_norm: float | None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(model, gradients, loss_fn, model)
        self._roots = sharded_roots(model)  # looking through all modules takes a while
        self._optimizer = optimizer
        self.functions = (loss_fn,)
        self._max_grad_norm = max_grad_norm
        self._skip_nonfinite = skip_nonfinite

    def forward_backward(self, inputs: StaticInputs, num_microbatches: int) -> Any:
        """Return what the loss function returned, detached, after forward and backward.

        The loss is the mean over microbatches; other results are stacked on a new dim 0 if there
        are several microbatches.

        Capture: no host sync; gradients land in the persistent buffers.
        """
        self._gradients.begin()
        clear_autocast_cache()
        outputs = []
        for index in range(num_microbatches):
            for root in self._roots:
                root.set_is_last_microbatch(index == num_microbatches - 1)
            outputs.append(self._microbatch(inputs, index, num_microbatches))
        for root in self._roots:
            root.finish_microbatches()
        self._end()
        return outputs[0] if len(outputs) == 1 else merge(outputs)

    def optimizer_step(self) -> Tensor | None:
        """Step; return [] float32, the global norm before clipping, None if not asked for.

        Capture: no host sync; norm and clip coefficient stay on the device.
        """
        with nvtx_range("optimizer"), torch.no_grad():
            grad_norm = coefficient = found_inf = None
            if self._max_grad_norm is not None or self._skip_nonfinite:
                whole, sharded = self._gradients.landed_views()
                if self.groups:  # of a pipeline each rank has a part of everything
                    sharded = {(*self.groups, *cut): held for cut, held in sharded.items()}
                    whole, sharded = [], {self.groups: whole, **sharded}
                device = next(self._models.parameters()).device
                grad_norm = global_norm(whole, sharded, device)
                if self._skip_nonfinite:
                    found_inf = grad_norm.isfinite().logical_not().to(torch.float32)
                if self._max_grad_norm is not None and not math.isinf(self._max_grad_norm):
                    coefficient = clip_coefficient(grad_norm, self._max_grad_norm)
            self._optimizer.step(coefficient, found_inf)
        return None if self._max_grad_norm is None else grad_norm

    def _microbatch(self, inputs: StaticInputs, index: int, num_microbatches: int) -> Any:
        args, kwargs = inputs.hand_out(index, num_microbatches)
        with torch.enable_grad():
            with nvtx_range("forward"), without_looks():
                with interruptible():
                    output = self._loss_fn(self._models, *args, **kwargs)
                loss = self._loss_of(output)
                scaled = loss / num_microbatches if num_microbatches > 1 else loss
            with nvtx_range("backward"):
                with interruptible():
                    torch.autograd.backward(scaled)
                self._gradients.end_backward()
        return tree_map(own, output)

    def _loss_of(self, output: Any) -> Tensor:
        loss = output[0] if isinstance(output, tuple) and output else output
        problem = None
        if not isinstance(loss, Tensor):
            problem = f"a {type(loss).__name__}"
        elif loss.numel() != 1:
            problem = f"a tensor of shape {tuple(loss.shape)}"
        elif not loss.requires_grad:
            problem = "a tensor that no trainable parameter contributed to (requires_grad=False)"
        if problem is not None:
            raise InvalidLossError(
                f"the loss is {problem}; expected a scalar tensor that requires a gradient. "
                "Remedy: return the loss, or (loss, aux), from loss_fn(model, *batch); without "
                "loss_fn the model must return the loss, or an output with .loss",
                source=self._loss_source(),
            )
        _check_tensors(output, "loss_fn returned", self._loss_source())
        scalar: Tensor = loss
        return scalar


class CustomIteration(AnyIteration):
    """The user's own function."""

    steps_inside = True

    def __init__(
        self,
        function: Callable[..., Any],
        models: object,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        gradients: PersistentGradients,
        *,
        loss_fn: LossFunction,
        module: nn.Module,
        groups: RankGroups = (),
        stepping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Prepare; ``function(models, optimizers, *batch)`` gets them as the user gave them.

        ``module`` holds all of them; ``stepping``: see ``CapturableOptimizer``.
        """
        super().__init__(models, gradients, loss_fn, module)
        self._module = module
        self.groups = groups
        self._stepping = stepping
        self._function = function
        self.functions = (function, loss_fn)
        self._optimizers = optimizers

    def forward_backward(self, inputs: StaticInputs, num_microbatches: int) -> Any:
        """Run the whole iteration; return what the function returned, detached.

        ConfigError: it gives torch a list of tensors that lie on several meshes.

        Capture: no host sync of ours; gradients land in the persistent buffers, and optimizers
        find them there at once.
        """
        self._gradients.begin(bind_at_once=True)
        clear_autocast_cache()
        with torch.enable_grad(), nvtx_range("iteration"), self._stepping(), without_looks():
            output = self._run(inputs)
        self._end()
        _check_tensors(output, "the iteration returned", definition_of(self._function))
        return tree_map(own, output)

    def _run(self, inputs: StaticInputs) -> Any:
        try:
            args, kwargs = inputs.hand_out()
            with interruptible():
                return self._function(self._models, self._optimizers, *args, **kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error) and self._has_several_meshes():
                raise ConfigError(
                    f"the iteration gives torch a list of tensors on several device meshes, or "
                    f"DTensors beside plain ones, which it refuses: {error} Ways out: an optimizer "
                    "of graphfsdp.optim (FusedAdam, Muon), which steps on this rank's parts; "
                    "graphfsdp.clip_grad_norm_(model, max_norm) instead of torch's; "
                    "or the default iteration, which takes torch's AdamW and SGD as well"
                ) from error
            raise

    def _has_several_meshes(self) -> bool:
        return num_meshes(self._module.parameters()) > 1

    def optimizer_step(self) -> Tensor | None:
        """Do nothing: the function has stepped."""
        return None


def clear_autocast_cache() -> None:
    # The cache of casted weights outlives an iteration if autocast does: stale weights.
    torch.clear_autocast_cache()


def _check_tensors(output: Any, returned: str, source: SourceLine | None) -> None:
    for leaf in tree_leaves(output):
        if leaf is not None and not isinstance(leaf, Tensor):
            beside = " beside the loss" if returned.startswith("loss_fn") else ""
            raise InvalidLossError(
                f"{returned} a {type(leaf).__name__}{beside}; expected tensors only, since a "
                "replay recomputes nothing else. Remedy: return it as a tensor",
                source=source,
            )


def own(leaf: Any) -> Any:
    """Return a result of an iteration as the caller may keep it."""
    # A copy, because a result may look at a weight or a buffer that this iteration updates, and
    # so that two results never share memory.
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def merge(outputs: list[Any]) -> Any:
    """Return the mean loss, and other results stacked, over the microbatches."""
    specs = [tree_structure(output) for output in outputs]
    loss, *others = [
        None if leaves[0] is None else torch.stack(leaves)
        for leaves in zip(*(tree_leaves(output) for output in outputs), strict=True)
    ]
    assert loss is not None
    return tree_unflatten([loss.mean(dim=0), *others], specs[0])
