"""The phases of a captured step: warm up, record once, replay."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.agreement import Agreement
from graphfsdp._capture.attempt import Attempt
from graphfsdp._capture.backend import Effect, Graph, GraphBackend, GraphFacts
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards import Guards
from graphfsdp._capture.interrupts import DeferredInterrupts
from graphfsdp._capture.iteration import Iteration, LossFunction
from graphfsdp._capture.memory_names import memory_names
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.report import CaptureReport
from graphfsdp._capture.results import Results
from graphfsdp._capture.static_inputs import StaticInputs
from graphfsdp.capturable import CapturableOptimizer
from graphfsdp.changes import refuse
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import PhaseError
from graphfsdp.nvtx import nvtx_range
from graphfsdp.sharded import MainGrad, sharded_roots

_LOG = logging.getLogger("graphfsdp")


class StepRunner:
    """Runs iterations: eagerly at first, then one recorded, then replayed.

    Knows nothing of the CapturedStep around it, whose finaliser holds this: so a step that nobody
    holds any more is freed at once, and one that lives until Python ends is released before torch
    is taken apart.

    Attributes:
        phase: What the next call does.
        device: Where the model lies.
        grad_norm: [] float32 of the last call, or None.
        breakage: Why the phase is BROKEN.
    """

    phase: Phase
    device: torch.device
    grad_norm: Tensor | None
    breakage: str

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
        self._model = model
        self._optimizer = optimizer
        self._backend = backend
        self.device = backend.device
        self._options = options
        self._gradients = PersistentGradients(
            named_params,
            dtype_of=lambda param: optimizer.main_grad_dtype(param, policy),
            use_decoupled_grad=optimizer.use_decoupled_grad,
            sharded=_sharded_gradients(model),
        )
        self._iteration = Iteration(
            model,
            optimizer,
            self._gradients,
            loss_fn=loss_fn,
            num_microbatches=options.microbatches,
            max_grad_norm=options.max_grad_norm,
        )
        groups = [g for root in sharded_roots(model) for g in root.process_groups()]
        self._agreement = Agreement(groups)
        self._pid = os.getpid()
        self._trained = list(named_params.values())
        self.phase = Phase.EAGER if options.scope is Scope.NONE else Phase.WARMUP
        self.breakage = ""
        self._graph: Graph | None = None
        self._inputs: StaticInputs | None = None
        self._facts: GraphFacts | None = None
        self._results = Results()
        self.grad_norm = None
        self._num_calls: Counter[str] = Counter()
        self._num_captures = 0
        self._capture_ms: float | None = None
        # FULL_ITERATION has the norm among the graph's results; else it is computed eagerly.
        self._full = options.scope is Scope.FULL_ITERATION
        self._guards = Guards(
            model,
            named_params,
            self._gradients,
            optimizer=optimizer.optimizer if self._full else None,
            device=backend.device,
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Train on one batch; see ``CapturedStep.__call__``."""
        if self.phase is Phase.REPLAY:
            with DeferredInterrupts():
                return self._unflatten(self._replay(args, kwargs))
        if self.phase is Phase.EAGER:
            return self._unflatten(self._run_eagerly(args, kwargs))
        return self._unflatten(self._attempt(args, kwargs))

    def report(self, *, measure: bool) -> CaptureReport:
        """Return the facts of this step; see ``CapturedStep.report``."""
        facts = self._facts
        inputs = self._inputs
        started = bool(self._num_calls.total())
        return CaptureReport(
            backend=self._backend.name,
            scope=self._options.scope.value,
            phase=self.phase.value,
            num_calls=dict(self._num_calls),
            num_captures=self._num_captures,
            num_nodes=None if facts is None else facts.num_nodes,
            num_ops=None if facts is None else facts.num_ops,
            op_counts={} if facts is None else facts.op_counts,
            capture_ms=self._capture_ms,
            static_input_bytes=0 if inputs is None else inputs.num_bytes,
            gradient_bytes=self._gradients.num_bytes,
            pool_bytes=0 if facts is None else facts.pool_bytes,
            num_escapes=0 if facts is None else facts.num_escapes,
            inputs={} if inputs is None else inputs.describe(),
            without_gradient=tuple(self._gradients.without_gradient()) if started else (),
            node_us=self.graph_to("measure").measure() if measure else (),
            program=None if facts is None else facts.program,
            names=memory_names(self._model, self._optimizer, self._gradients, inputs),
        )

    def graph_to(self, do: str) -> Graph:
        """Return the graph.

        Raises:
            PhaseError: there is none; ``do`` says what it was wanted for.
        """
        if self._graph is None:
            raise PhaseError(
                f"there is no graph to {do} in phase {self.phase.value}. Remedy: call the step "
                f"until it has captured ({self._options.warmup_steps + 1} calls)"
            )
        return self._graph

    def release(self) -> None:
        """Give everything back, the graph first, then its pool and inputs."""
        if os.getpid() != self._pid:
            return  # a forked child holds a copy; the graph and its streams are the parent's
        self.phase = Phase.CLOSED
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()
        self._inputs = None
        self._guards.close()
        self._gradients.close()

    def _load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StaticInputs:
        with nvtx_range("copy-in"):
            inputs = self._inputs
            if inputs is not None:
                inputs.load(args, kwargs)
                return inputs
            return StaticInputs(
                args,
                kwargs,
                device=self._backend.device,
                num_microbatches=self._options.microbatches,
            )

    def _graphed(self) -> list[Tensor]:
        """Run what the graph holds; return its results as a flat list.

        Capture: everything in here.
        """
        assert self._inputs is not None
        results = self._results.flatten(self._iteration.forward_backward(self._inputs))
        if self._full:
            grad_norm = self._iteration.optimizer_step()
            results += [] if grad_norm is None else [grad_norm]
        return results

    def _step_outside(self) -> None:
        """Step the optimizer where it is not in the graph."""
        if not self._full:
            with self._backend.on_capture_stream():
                self.grad_norm = self._iteration.optimizer_step()

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        self._inputs = self._load(args, kwargs)
        try:
            with nvtx_range("eager"), self._backend.on_capture_stream():
                results = self._graphed()
            self._step_outside()
        except BaseException:  # also Ctrl-C, of which torch tells no forward hook
            for root in sharded_roots(self._model):
                root.abandon_iteration()
            raise
        self._num_calls["eager"] += 1
        return results

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Warm up or capture; undo everything if that fails, here or on another rank."""
        attempt = Attempt(self._model, self._optimizer, self._gradients, self._backend)
        inputs, grad_norm, results = self._inputs, self.grad_norm, self._results
        self._results = Results()
        self._agreement.begin()
        captures = self._num_calls["warmup"] >= self._options.warmup_steps
        try:
            with attempt.watching():
                self._inputs = self._load(args, kwargs)
                return self._capture(attempt) if captures else self._warm_up()
        except BaseException as error:  # whatever ends it, it must leave no trace
            with DeferredInterrupts():
                attempt.roll_back()
                self._inputs, self.grad_norm, self._results = inputs, grad_norm, results
                graph, self._graph = self._graph, None
                if graph is not None:
                    graph.close()
                self.phase = Phase.WARMUP
            self._agreement.fail(error)
            raise

    def _warm_up(self) -> list[Tensor]:
        with nvtx_range("warm-up"), self._backend.on_capture_stream():
            results = self._graphed()
        self._step_outside()
        self._agreement.settle()
        self._num_calls["warmup"] += 1
        return results

    def _capture(self, attempt: Attempt) -> list[Tensor]:
        self.phase = self.phase.to(Phase.CAPTURE)
        started = time.perf_counter()
        assert self._inputs is not None

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read)
            self._guards.arm(was_read)
            self._agreement.settle()

        if self._full:
            self._optimizer.before_replay()
            self._optimizer.bake()
        with nvtx_range("capture"), self._guards.recording():
            graph, results = self._backend.record(
                self._graphed,
                self._model,
                check,
                collective=self._agreement.is_collective,
                scratch=[*self._gradients.storages(), *self._inputs.tensors()],
            )
        self._graph = graph
        if not self._full:
            self._step_outside()
            self._agreement.settle()
        self.phase = self.phase.to(Phase.REPLAY)
        self._capture_ms = (time.perf_counter() - started) * 1e3
        self._num_captures += 1
        self._facts = graph.facts
        self._num_calls["capture"] += 1
        _LOG.info("captured %s nodes in %.0f ms", graph.facts.num_nodes, self._capture_ms)
        return results

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        graph = self._graph
        assert graph is not None
        self._load(args, kwargs)
        refuse(self._guards.changes())
        if self._full:
            self._optimizer.before_replay()
        self._gradients.rebind()
        try:
            with nvtx_range("replay"):
                results = graph.replay()
        except BaseException as error:  # of an operator, of a collective, or no memory
            self._after_failed_replay(graph.effect, error)
            raise
        # A replay writes the parameters behind autograd's back. With this, a backward pass
        # through a graph that was made before the replay is an error, as it is in eager mode.
        torch.autograd.graph.increment_version(self._trained)
        self._step_outside()
        self._num_calls["replay"] += 1
        return results

    def _after_failed_replay(self, effect: Effect, error: BaseException) -> None:
        """Say in what state a replay that raised has left everything."""
        if effect is Effect.NONE:
            self._gradients.drop()
        if effect is Effect.PART:
            self.phase = self.phase.to(Phase.BROKEN)
            self.breakage = f"{type(error).__name__}: {effect.value}"
        error.add_note(f"graphfsdp: {effect.value}")

    def _unflatten(self, results: list[Tensor]) -> Any:
        output, grad_norm = self._results.unflatten(results)
        if grad_norm is not None:
            self.grad_norm = grad_norm
        return output


def _sharded_gradients(model: nn.Module) -> dict[nn.Parameter, MainGrad]:
    found: dict[nn.Parameter, MainGrad] = {}
    for root in sharded_roots(model):
        root.prepare_shards()  # before anything remembers an address
        found.update(root.main_grads())
    return found


__all__ = ["StepRunner"]
