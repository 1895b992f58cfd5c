"""Everything that an iteration needs, and one iteration of it over given inputs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from graphfsdp._capture.attempt import Attempt
from graphfsdp._capture.backend import GraphBackend
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards import Guards
from graphfsdp._capture.iteration import Iteration, LossFunction
from graphfsdp._capture.recording import Recording
from graphfsdp.capturable import CapturableOptimizer
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.sharded import main_grads_of, sharded_roots


class Engine:
    """A model with its optimizer and persistent gradients.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        gradients: The persistent gradients.
        backend: Records, and knows the device.
        full: The optimizer steps inside the graph.
        grad_norm: [] float32 of the last iteration, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: CapturableOptimizer,
        backend: GraphBackend,
        *,
        named_params: Mapping[str, nn.Parameter],
        loss_fn: LossFunction,
        policy: MixedPrecisionPolicy,
        options: CaptureOptions,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.backend = backend
        self.gradients = PersistentGradients(
            named_params,
            dtype_of=lambda param: optimizer.main_grad_dtype(param, policy),
            use_decoupled_grad=optimizer.use_decoupled_grad,
            sharded=main_grads_of(model),
        )
        self._iteration = Iteration(
            model,
            optimizer,
            self.gradients,
            loss_fn=loss_fn,
            max_grad_norm=options.max_grad_norm,
        )
        self._named_params = dict(named_params)
        self._trained = list(named_params.values())
        self.full = options.scope is Scope.FULL_ITERATION
        self.grad_norm: Tensor | None = None

    def iterate(self, recording: Recording) -> list[Tensor]:
        """Run what a graph holds; return its results as a flat list, the gradient norm last.

        Capture: everything in here.
        """
        output = self._iteration.forward_backward(recording.inputs, recording.num_microbatches)
        results = recording.results.flatten(output)
        if self.full:
            grad_norm = self._iteration.optimizer_step()
            results += [] if grad_norm is None else [grad_norm]
        return results

    def step_outside(self) -> None:
        """Step the optimizer where it is not in the graph."""
        if not self.full:
            with self.backend.on_capture_stream():
                self.grad_norm = self._iteration.optimizer_step()

    def attempt(self) -> Attempt:
        """Return what undoes an iteration that runs from now on and fails."""
        return Attempt(self.model, self.optimizer, self.gradients, self.backend)

    def guards(self) -> Guards:
        """Return what is to be armed when an iteration has been recorded."""
        return Guards(
            self.model,
            self._named_params,
            self.gradients,
            optimizer=self.optimizer.optimizer if self.full else None,
            device=self.backend.device,
        )

    def before_replay(self) -> None:
        """Bring what a replay reads up to date, and put the gradients where the user looks.

        Raises:
            GuardError: a number that the recording has baked in was changed; it is named.
        """
        if self.full:
            self.optimizer.before_replay()
        self.gradients.rebind()

    def after_replay(self) -> None:
        """Do what Python does after an iteration, and a replay does not."""
        # A replay writes the parameters behind autograd's back. With this, a backward pass
        # through a graph that was made before the replay is an error, as it is in eager mode.
        torch.autograd.graph.increment_version(self._trained)
        self.step_outside()

    def abandon(self) -> None:
        """Let the sharded units forget an eager iteration that was interrupted."""
        for root in sharded_roots(self.model):
            root.abandon_iteration()


__all__ = ["Engine"]
