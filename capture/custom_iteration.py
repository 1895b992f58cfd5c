"""An iteration that is the user's own function: forward, backward and optimizer steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.iteration import LossFunction, own
from graphfsdp._capture.trace.source import definition_of
from graphfsdp.base.dtensors import num_meshes
from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.errors import ConfigError, InvalidLossError


class CustomIteration:
    """Runs the user's function over static inputs. The same Python runs eagerly and recorded."""

    steps_inside = True

    def __init__(
        self,
        function: Callable[..., Any],
        models: nn.Module | Sequence[nn.Module],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        gradients: PersistentGradients,
        *,
        loss_fn: LossFunction,
    ) -> None:
        """Prepare.

        Args:
            function: ``function(models, optimizers, *batch)`` does the whole iteration.
            models: As the user gave them.
            optimizers: As the user gave them.
            gradients: Where the gradients land.
            loss_fn: For evaluation.
        """
        self._function = function
        self.functions: tuple[Callable[..., Any], ...] = (function, loss_fn)
        self._models = models
        self._optimizers = optimizers
        self._gradients = gradients
        self._loss_fn = loss_fn

    def forward_backward(self, inputs: StaticInputs, num_microbatches: int) -> Any:
        """Run the whole iteration.

        Returns:
            What the function returned, detached.

        Raises:
            InvalidLossError: it returned something else than tensors.
            ConfigError: it gives torch a list of tensors that lie on several meshes.

        Capture: no host sync of ours; gradients land in the persistent buffers, and optimizers
            find them there at once.
        """
        self._gradients.begin(bind_at_once=True)
        self._clear_autocast_cache()
        with torch.enable_grad(), nvtx_range("iteration"):
            output = self._run(inputs)
        self._gradients.finish()
        return self._owned(output)

    def _run(self, inputs: StaticInputs) -> Any:
        try:
            return self._function(self._models, self._optimizers, *inputs.args, **inputs.kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error) and self._has_several_meshes():
                raise ConfigError(
                    f"the iteration gives torch a list of tensors on several device meshes, or "
                    f"DTensors beside plain ones, which it refuses: {error} Ways out: an optimizer "
                    "of graphfsdp.optim (FusedAdam, FusedSGD, FusedLion), which steps on this "
                    "rank's parts; graphfsdp.clip_grad_norm_(model, max_norm) instead of torch's; "
                    "or the default iteration, which takes torch's AdamW and SGD as well"
                ) from error
            raise

    def _has_several_meshes(self) -> bool:
        models = [self._models] if isinstance(self._models, nn.Module) else self._models
        return num_meshes(param for model in models for param in model.parameters()) > 1

    def optimizer_step(self) -> Tensor | None:
        """Do nothing: the function has stepped."""
        return None

    def forward(self, inputs: StaticInputs, num_microbatches: int) -> Any:
        """Run the loss function without gradients.

        Returns:
            What it returned.

        Raises:
            InvalidLossError: it returned something else than tensors.

        Capture: no host sync of ours.
        """
        with torch.no_grad(), nvtx_range("forward"):
            self._clear_autocast_cache()
            return self._owned(self._loss_fn(self._models, *inputs.args, **inputs.kwargs))

    def _clear_autocast_cache(self) -> None:
        # The cache of casted weights outlives an iteration if autocast does: stale weights.
        torch.clear_autocast_cache()

    def _owned(self, output: Any) -> Any:
        for leaf in pytree.tree_leaves(output):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise InvalidLossError(
                    f"the iteration returned a {type(leaf).__name__}; expected tensors only, since "
                    "a replay recomputes nothing else. Remedy: return it as a tensor",
                    source=definition_of(self._function),
                )
        return pytree.tree_map(own, output)
