"""The captured step: warm up, record once, replay."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphfsdp._capture.agreement import Agreement
from graphfsdp._capture.backend import Graph, GraphBackend, GraphFacts
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards import AddressGuard
from graphfsdp._capture.host_state import HostState
from graphfsdp._capture.iteration import Iteration, LossFunction
from graphfsdp._capture.memory_names import memory_names
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.report import CaptureReport
from graphfsdp._capture.static_inputs import StaticInputs
from graphfsdp.capturable import CapturableOptimizer
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import CaptureError, PhaseError
from graphfsdp.nvtx import nvtx_range
from graphfsdp.sharded import MainGrad, sharded_roots

_LOG = logging.getLogger("graphfsdp")


class CapturedStep:
    """One training iteration per call: eagerly at first, then as one graph launch.

    Made by ``graphfsdp.capture``. A context manager; leaving it closes it.
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
        self._model = model
        self._optimizer = optimizer
        self._backend = backend
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
        self._groups = [g for root in sharded_roots(model) for g in root.process_groups()]
        self._addresses: AddressGuard | None = None
        self._trained = list(named_params.values())
        self._phase = Phase.EAGER if options.scope is Scope.NONE else Phase.WARMUP
        self._inputs: StaticInputs | None = None
        self._graph: Graph | None = None
        self._facts: GraphFacts | None = None
        self._spec: pytree.TreeSpec | None = None
        self._is_tensor: list[bool] = []  # by leaf of the output; the others are None
        self._grad_norm: Tensor | None = None
        self._num_calls: Counter[str] = Counter()
        self._num_captures = 0
        self._capture_ms: float | None = None
        # FULL_ITERATION has the norm among the graph's results; else it is computed eagerly.
        self._full = options.scope is Scope.FULL_ITERATION

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch.

        Args:
            *args: The batch, as ``loss_fn`` takes it after the model: any nesting of tensors.
            **kwargs: Likewise. Values that are no tensors must be equal in every call.

        Returns:
            What ``loss_fn`` returned, detached, in tensors that are the caller's to keep.

        Raises:
            BatchMismatchError: the batch is unlike the first one.
            CaptureError: the iteration cannot be captured. Parameters, buffers, gradients,
                optimizer state and RNG are as they were before this call.
            GuardError: something that the graph has baked in was changed.
            PhaseError: the step is closed.
        """
        if self._phase is Phase.CLOSED:
            raise PhaseError("this captured step is closed. Remedy: capture again")
        if self._phase is Phase.CAPTURE:
            raise PhaseError(
                "the captured step was called while it records itself. Remedy: loss_fn and the "
                "model must not call the step"
            )
        if torch.is_inference_mode_enabled():
            raise PhaseError(
                "the captured step was called under torch.inference_mode, where nothing can be "
                "trained. Remedy: call it outside (torch.no_grad is fine)"
            )
        with nvtx_range("copy-in"):
            self._load(args, kwargs)
        if self._phase is Phase.REPLAY:
            results = self._replay()
        elif self._phase is Phase.EAGER or self._num_calls["warmup"] < self._options.warmup_steps:
            results = self._run_eagerly()
        else:
            results = self._capture()
        return self._unflatten(results)

    @property
    def phase(self) -> Phase:
        """What the next call does."""
        return self._phase

    @property
    def grad_norm(self) -> Tensor | None:
        """[] float32 global gradient norm of the last call, before clipping.

        None before the first call and without ``max_grad_norm``. Each call makes a new tensor.
        """
        return self._grad_norm

    def report(self, *, measure: bool = False) -> CaptureReport:
        """Return the facts of this step.

        Args:
            measure: Also replay the last batch a few times with a clock at each node, and undo
                it bit for bit. Collective: where there are several ranks, all must do it.

        Raises:
            PhaseError: there is nothing to measure: no graph yet, or one on a GPU.
        """
        facts = self._facts
        started = bool(self._num_calls.total())
        return CaptureReport(
            backend=self._backend.name,
            scope=self._options.scope.value,
            phase=self._phase.value,
            num_calls=dict(self._num_calls),
            num_captures=self._num_captures,
            num_nodes=None if facts is None else facts.num_nodes,
            num_ops=None if facts is None else facts.num_ops,
            op_counts={} if facts is None else facts.op_counts,
            capture_ms=self._capture_ms,
            static_input_bytes=0 if self._inputs is None else self._inputs.num_bytes,
            gradient_bytes=self._gradients.num_bytes,
            pool_bytes=0 if facts is None else facts.pool_bytes,
            num_escapes=0 if facts is None else facts.num_escapes,
            inputs={} if self._inputs is None else self._inputs.describe(),
            without_gradient=tuple(self._gradients.without_gradient()) if started else (),
            node_us=self._measured() if measure else (),
            program=None if facts is None else facts.program,
            names=memory_names(self._model, self._optimizer, self._gradients, self._inputs),
        )

    def _measured(self) -> tuple[float, ...]:
        if self._graph is None:
            raise PhaseError(
                f"there is no graph to measure in phase {self._phase.value}. Remedy: call the step "
                f"until it has captured ({self._options.warmup_steps + 1} calls)"
            )
        return self._graph.measure()

    def close(self) -> None:
        """Give graph and static inputs back and unhook the parameters; idempotent.

        Gradients stay bound to the persistent buffers until the next ``zero_grad``.
        """
        if self._phase is Phase.CLOSED:
            return
        self._phase = self._phase.to(Phase.CLOSED)
        if self._graph is not None:
            self._graph.close()  # graph first, then its pool and inputs
            self._graph = None
        self._inputs = None
        self._gradients.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs is not None:
            self._inputs.load(args, kwargs)
            return
        self._inputs = StaticInputs(
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
        leaves, self._spec = pytree.tree_flatten(self._iteration.forward_backward(self._inputs))
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._full:
            grad_norm = self._iteration.optimizer_step()
            results += [] if grad_norm is None else [grad_norm]
        return results

    def _step_outside(self) -> None:
        """Step the optimizer where it is not in the graph."""
        if not self._full:
            with self._backend.on_capture_stream():
                self._grad_norm = self._iteration.optimizer_step()

    def _run_eagerly(self) -> list[Tensor]:
        eager = self._phase is Phase.EAGER
        with nvtx_range("eager" if eager else "warm-up"), self._backend.on_capture_stream():
            results = self._graphed()
        self._step_outside()
        self._num_calls["eager" if eager else "warmup"] += 1
        return results

    def _capture(self) -> list[Tensor]:
        self._phase = self._phase.to(Phase.CAPTURE)
        started = time.perf_counter()
        state = HostState(self._model, self._optimizer.optimizer, self._gradients)
        agreement = Agreement(self._groups)

        def check(was_read: Callable[[Tensor], bool]) -> None:
            state.check_unchanged(was_read)
            agreement.settle(None)

        try:
            if self._full:
                self._optimizer.before_replay()
                self._optimizer.bake()
            with nvtx_range("capture"):
                self._graph, results = self._backend.record(
                    self._graphed, self._model, check, collective=agreement.is_collective
                )
        except BaseException as error:
            state.restore()
            self._phase = self._phase.to(Phase.WARMUP)
            if isinstance(error, CaptureError):
                agreement.settle(error)
            raise
        self._step_outside()
        self._addresses = AddressGuard(self._model)
        self._phase = self._phase.to(Phase.REPLAY)
        self._capture_ms = (time.perf_counter() - started) * 1e3
        self._num_captures += 1
        self._facts = self._graph.facts
        self._num_calls["capture"] += 1
        _LOG.info("captured %s nodes in %.0f ms", self._graph.facts.num_nodes, self._capture_ms)
        return results

    def _replay(self) -> list[Tensor]:
        assert self._graph is not None
        assert self._addresses is not None
        self._addresses.check()
        if self._full:
            self._optimizer.before_replay()
        self._gradients.rebind()
        with nvtx_range("replay"):
            results = self._graph.replay()
        # A replay writes the parameters behind autograd's back. With this, a backward pass
        # through a graph that was made before the replay is an error, as it is in eager mode.
        torch.autograd.graph.increment_version(self._trained)
        self._step_outside()
        self._num_calls["replay"] += 1
        return results

    def _unflatten(self, results: list[Tensor]) -> Any:
        assert self._spec is not None
        num_outputs = sum(self._is_tensor)
        if len(results) > num_outputs:
            self._grad_norm = results[num_outputs]
        tensors = iter(results[:num_outputs])
        leaves = [next(tensors) if is_tensor else None for is_tensor in self._is_tensor]
        return pytree.tree_unflatten(leaves, self._spec)


def _sharded_gradients(model: nn.Module) -> dict[nn.Parameter, MainGrad]:
    found: dict[nn.Parameter, MainGrad] = {}
    for root in sharded_roots(model):
        root.prepare_shards()  # before anything remembers an address
        found.update(root.main_grads())
    return found


__all__ = ["CapturedStep"]
