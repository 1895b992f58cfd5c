"""The Python that is captured: forward, backward, norm, clip and step, or the user's own."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.rules.looks import without_looks
from graphfsdp._capture.trace.source import definition_of
from graphfsdp._capture.undo.interrupts import interruptible
from graphfsdp.base.dtensors import RankGroups
from graphfsdp.base.norms import clip_coefficient, global_norm
from graphfsdp.base.protocols import CapturableOptimizer, IterationPart, sharded_roots
from graphfsdp.base.streams import nvtx_range
from graphfsdp.base.torch_internals import tree_leaves, tree_map, tree_structure, tree_unflatten
from graphfsdp.errors import InvalidLossError, SourceLine

LossFunction = Callable[..., Any]


def default_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what the model returns, or its ``.loss`` where the output has one."""
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


class Iteration:
    """Forward, backward, norm, clip and step; the same Python runs eagerly and recorded.

    Attributes:
        steps_inside: ``forward_backward`` steps the optimizers, too.
        functions: The user's functions that it runs.
        groups: The ranks of a pipeline, which have other parts of the model; none without one.
        schedule: In words, of a pipeline, all of whose ranks must have the same; "" without one.
    """

    steps_inside = False
    schedule = ""
    _binds_at_once = False  # gradients are where optimizers find them as soon as they are there

    def __init__(
        self,
        module: nn.Module,
        optimizer: CapturableOptimizer,
        gradients: PersistentGradients,
        *,
        loss_fn: LossFunction,
        groups: RankGroups = (),
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.functions: tuple[Callable[..., Any], ...] = (loss_fn,)
        self.groups = groups
        self._module = module
        self._models: Any = module  # as loss_fn gets them
        self._optimizer = optimizer
        self._gradients = gradients
        self._loss_fn = loss_fn
        self._max_grad_norm = max_grad_norm
        self._skip_nonfinite = skip_nonfinite
        self._roots = sharded_roots(module)  # looking through all modules takes a while
        self._parts = [part for part in module.modules() if isinstance(part, IterationPart)]

    def prepare(self, inputs: StaticInputs, *, trains: bool) -> None:
        """Do what comes once, before the first iteration of a kind, and is no part of it."""

    def forward_backward(self, inputs: StaticInputs) -> Any:
        """Return what the user's function returned, detached, after forward and backward.

        Capture: no host sync of ours; gradients land in the persistent buffers.
        """
        self._gradients.begin(bind_at_once=self._binds_at_once)
        clear_autocast_cache()
        with torch.enable_grad(), without_looks():
            output = self._run(inputs)
        self._gradients.finish()
        with torch.no_grad():
            for part in self._parts:
                part.end_iteration()
        return output

    def forward(self, inputs: StaticInputs) -> Any:
        """Run the forward pass without gradients; merge the microbatches' results as in training.

        Capture: no host sync.
        """
        outputs = []
        with torch.no_grad(), nvtx_range("forward"), without_looks():
            clear_autocast_cache()
            for index in range(inputs.num_microbatches):
                args, kwargs = inputs.hand_out(index)
                with interruptible():
                    output = self._loss_fn(self._models, *args, **kwargs)
                _check_tensors(output, "loss_fn returned", self._loss_source())
                outputs.append(tree_map(own, output))
        return outputs[0] if len(outputs) == 1 else merge(outputs)

    def optimizer_step(self) -> Tensor | None:
        """Step; return [] float32, the global norm before clipping, None if not asked for.

        Capture: no host sync; norm and clip coefficient stay on the device.
        """
        with nvtx_range("optimizer"), torch.no_grad():
            grad_norm = coefficient = found_inf = None
            if self._max_grad_norm is not None or self._skip_nonfinite:
                landed = self._gradients.landed_views().items()
                # Of a pipeline each rank has a part of everything.
                held = {(*self.groups, *cut): parts for cut, parts in landed}
                grad_norm = global_norm(held, next(self._module.parameters()).device)
                if self._skip_nonfinite:
                    found_inf = grad_norm.isfinite().logical_not().to(torch.float32)
                if self._max_grad_norm is not None and not math.isinf(self._max_grad_norm):
                    coefficient = clip_coefficient(grad_norm, self._max_grad_norm)
            self._optimizer.step(coefficient, found_inf)
        return None if self._max_grad_norm is None else grad_norm

    def _run(self, inputs: StaticInputs) -> Any:
        """Return the mean loss over microbatches, and other results stacked on a new dim 0."""
        outputs = []
        for index in range(inputs.num_microbatches):
            for root in self._roots:
                root.set_is_last_microbatch(index == inputs.num_microbatches - 1)
            outputs.append(self._microbatch(inputs, index))
        for root in self._roots:
            root.finish_microbatches()
        return outputs[0] if len(outputs) == 1 else merge(outputs)

    def _microbatch(self, inputs: StaticInputs, index: int) -> Any:
        args, kwargs = inputs.hand_out(index)
        count = inputs.num_microbatches
        with nvtx_range("forward"):
            with interruptible():
                output = self._loss_fn(self._models, *args, **kwargs)
            loss = self._loss_of(output)
            scaled = loss / count if count > 1 else loss
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

    def _loss_source(self) -> SourceLine | None:
        is_own = self._loss_fn is not default_loss
        return definition_of(self._loss_fn if is_own else self._models)


class CustomIteration(Iteration):
    """The user's own function, which gets models and optimizers as the user gave them."""

    steps_inside = True
    _binds_at_once = True

    def __init__(
        self,
        function: Callable[..., Any],
        models: object,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        module: nn.Module,
        optimizer: CapturableOptimizer,
        gradients: PersistentGradients,
        *,
        loss_fn: LossFunction,
        groups: RankGroups,
    ) -> None:
        """Prepare ``function(models, optimizers, *batch)``; ``module`` holds all models."""
        super().__init__(module, optimizer, gradients, loss_fn=loss_fn, groups=groups)
        self._function = function
        self._models = models
        self._optimizers = optimizers
        self.functions = (function, loss_fn)

    def forward_backward(self, inputs: StaticInputs) -> Any:
        """Run the whole iteration; optimizers find gradients in the persistent buffers at once."""
        output = super().forward_backward(inputs)
        _check_tensors(output, "the iteration returned", definition_of(self._function))
        return tree_map(own, output)

    def _run(self, inputs: StaticInputs) -> Any:
        args, kwargs = inputs.hand_out()
        with nvtx_range("iteration"), self._optimizer.stepping(), interruptible():
            return self._function(self._models, self._optimizers, *args, **kwargs)

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
