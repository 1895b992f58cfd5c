"""Everything that an iteration needs; its iterations, those that warm up and those that record."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards.guards import Guards
from graphfsdp._capture.guards.modules import join, weights_of
from graphfsdp._capture.guards.names import ReadNames
from graphfsdp._capture.guards.uses import tell_of
from graphfsdp._capture.guards.walk import Walk
from graphfsdp._capture.inputs import StaticInputs, TensorLeaf
from graphfsdp._capture.iteration import Iteration
from graphfsdp._capture.messages import messages_as_operators
from graphfsdp._capture.ranks.ranks import Ranks, WarmUpAgainError
from graphfsdp._capture.recording import Recording, Recordings, Results
from graphfsdp._capture.rules.constants import ConstantWatch
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp._capture.trace.source import Ran, has_compiled_regions
from graphfsdp._capture.undo.host_state import Attempt
from graphfsdp._capture.undo.interrupts import deliver_waiting
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.protocols import CapturableOptimizer, main_grads_of, sharded_roots, units_of
from graphfsdp.base.recomputation import torchs_checkpoints_as_ours
from graphfsdp.base.streams import in_turn, nvtx_range
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, OnChange, Scope, Undo
from graphfsdp.errors import CaptureError, Change, GuardError, Refuse, raised

_LOG = logging.getLogger("graphfsdp")
_UNAUDITED = (
    "no warm-up was watched (nothing may be that runs code of torch.compile), so an audit has "
    "nothing to compare with, and audit=%s is left out. Remedy: verify=n compares all numbers"
)
# Not Inductor's own graphs, since one graph is to hold all; and the generators' numbers of eager
# mode, which torch replays out of a captured graph as well.
_COMPILE_OPTIONS = MappingProxyType({"triton.cudagraphs": False, "fallback_random": True})


class Engine:
    """A model with its optimizer and persistent gradients.

    Attributes:
        backend: Records, and knows the device.
        units: Of sharded models; what the user has unsharded by hand is put back before each run.
        full: The optimizer steps inside the graph.
        refuse: Raises what a capture finds behind its iteration; a check notes it.
        grad_norm: [] float32 of the last iteration, or None.
        trained: The parameters that gradients are kept for.
        replayed: By the last run; None if that was no replay.
        ranks: That make each iteration together.
        torn: Why nobody knows weights and optimizer state any more; empty while they are known.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: CapturableOptimizer,
        backend: GraphBackend,
        *,
        find_params: Callable[[], Mapping[str, nn.Parameter]],
        make_iteration: Callable[[PersistentGradients], Iteration],
        policy: MixedPrecisionPolicy,
        options: CaptureOptions,
        compiles: Iterable[nn.Module] = (),
    ) -> None:
        """``compiles``: what torch.compile makes the kernels of while this lives, on a GPU.

        The first warm-up compiles and autotunes, on the capture stream; the capture runs what there
        is by then. Modules that the user has compiled stay as they are, and so does what contains
        them.
        """
        self.model = model
        self.optimizer = optimizer
        self.backend = backend
        self._find_params = find_params
        self.units = units_of(model)
        self._policy = policy
        self._make_iteration = make_iteration
        self._take_gradients()
        self.full = options.scope is Scope.FULL_ITERATION
        self._options = options
        self.refuse: Refuse = raised
        self.grad_norm: Tensor | None = None
        self.replayed: Recording | None = None
        self._has_iterated = False
        self._has_stepped = False
        self._compiled = [each for each in compiles if not has_compiled_regions(each)]
        for each in self._compiled:
            each.compile(options=dict(_COMPILE_OPTIONS))
        groups = [group for root in sharded_roots(model) for group in root.process_groups()]
        # Those of all ranks that make an iteration together.
        self.ranks = Ranks([*groups, *self._iteration.groups], deliver_waiting, backend.device)
        self.torn = ""

    def _take_gradients(self) -> None:
        self._named_params = dict(self._find_params())
        self.trained = list(self._named_params.values())
        self._forms = list(map(TensorLeaf.of, self.trained))
        self.gradients = PersistentGradients(
            self._named_params,
            dtype_of=lambda param: self.optimizer.main_grad_dtype(param, self._policy),
            use_decoupled_grad=self.optimizer.use_decoupled_grad,
            sharded=main_grads_of(self.model),
        )
        self._iteration = self._make_iteration(self.gradients)

    def refresh(self) -> None:
        """Begin anew with the parameters and the numbers that there are now."""
        self.gradients.begin()  # what is no longer trained must have no gradient
        self.gradients.close()
        self._take_gradients()
        self.optimizer.bake()

    def check_parameters(self, *, follows: bool) -> None:
        """GuardError if a parameter was moved, cast or replaced since its gradient was made.

        ``follows``: others may be trainable than were before.
        """
        if follows and list(map(id, self._find_params().values())) != list(map(id, self.trained)):
            self.refresh()
        now = self._named_params if follows else dict(self.model.named_parameters())
        others = [
            (name, was, now.get(name, param))
            for (name, param), was in zip(self._named_params.items(), self._forms, strict=True)
            if not was.matches(param) or now.get(name, param) is not param
        ]
        if not others:
            return
        name, was, param = others[0]
        more = f", and {len(others) - 1} more are not as they were" if others[1:] else ""
        raise GuardError(
            "the model was moved, cast or changed after graphfsdp.capture, which has made its "
            f"gradients: parameter {name!r} was {was}, and is now "
            f"{'another one, ' if was.matches(param) else ''}{TensorLeaf.of(param)}{more}"
            ". Remedy: change the model first, then make the optimizer of its parameters, and "
            "then capture; a forward pass that puts another one there writes into it instead "
            "(copy_, under torch.no_grad())"
        )

    def iterate(
        self,
        inputs: StaticInputs,
        watch: AbstractContextManager[None] | None = None,
        *,
        trains: bool = True,
    ) -> tuple[list[Tensor], Results]:
        """Run all that a graph holds: an iteration, or its forward pass alone.

        Return its results as a flat list, the gradient norm last, and their form.
        """
        self.replayed = None
        iteration = self._iteration
        output = None
        try:
            # In place of what no graph can hold.
            with messages_as_operators(), torchs_checkpoints_as_ours():
                iteration.prepare(inputs, trains=trains)
                with watch or nullcontext():
                    run = iteration.forward_backward if trains else iteration.forward
                    output = run(inputs)
            form = Results(inputs)
            results = form.flatten(output)
        except CaptureError:
            if output is not None and self.full and trains:
                # Refused at its end; other ranks go on to the norm's reduction.
                iteration.optimizer_step()
            raise
        if trains:
            self._has_iterated = True
        if trains and self.full:
            self._make_room()
            grad_norm = iteration.optimizer_step()
            results += [] if grad_norm is None else [grad_norm]
        return results, form

    def _make_room(self) -> None:
        """Give back what the first activations have left, before the optimizer makes its state.

        The state would lie in the middle of that for ever, and the rest could not be used again,
        neither by the next activations nor by the pool of a graph.
        """
        if not self._has_stepped:
            self._has_stepped = True
            self.backend.give_back_memory(workspaces=self._options.scope is not Scope.NONE)

    def unpack(self, form: Results, results: list[Tensor]) -> object:
        """Return what the user's function returned, and keep the gradient norm."""
        output, grad_norm = form.unflatten(results)
        if grad_norm is not None:
            self.grad_norm = grad_norm
        return output

    @property
    def skipped_steps(self) -> Tensor | None:
        """[] float32, a copy of the number of steps that were left out; None if none can be."""
        count = self.optimizer.skipped_steps()
        return None if count is None else count.clone()

    def step_outside(self) -> None:
        if not self.full:
            self._make_room()
            with self.backend.on_capture_stream() as results:
                self.grad_norm = self._iteration.optimizer_step()
                results += [] if self.grad_norm is None else [self.grad_norm]

    @property
    def steps_inside(self) -> bool:
        return self._iteration.steps_inside

    @property
    def schedule(self) -> str:
        return self._iteration.schedule

    def attempt(self, *, copies: bool = True, beside: Iterable[Tensor] = ()) -> Attempt:
        """Return what undoes an iteration that runs from now on and fails.

        Without ``copies`` it puts back what Python holds, and no contents. ``beside``: tensors that
        are no state of ours, and that it may write.
        """
        known = (tensor for _, tensor in self.named_state())
        grads = (param.grad for param in self.model.parameters() if param.grad is not None)
        state = chain(known, grads, self.gradients.storages(), beside)
        undo = self.backend.begin_undo(state, self.gradients.unseen()) if copies else None
        return Attempt(
            self.model,
            self.optimizer.optimizers,
            undo,
            device=self.backend.device,
            restore_gradients=self.gradients.save_bindings(),
        )

    def around(self) -> Iterator[Tensor]:
        """Yield the tensors that the functions of the iteration lead to, outside of the model."""
        found = Walk(ReadNames(Ran()), self.model, self._iteration.functions)
        yield from (each.known for each in found.places.values() if isinstance(each.known, Tensor))
        yield from (tensor for _, tensor in weights_of(found.outside(self.model)))

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what an iteration is known to write, in the order in which it computes that."""
        for name, view in self.gradients.named_views():
            yield f"the gradient of {name!r}", view
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name!r}", buffer
        for path, module in self.model.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f"attribute {join(path, key)!r}", value
        for name, state in self.optimizer.state_tensors():
            yield f"optimizer state, {name}", state
        for name, param in self.model.named_parameters():
            yield f"parameter {name!r}", param

    def attempt_on(
        self, recording: Recording, recordings: Recordings, *, captures: bool, notes: bool
    ) -> list[Tensor]:
        """Warm up, or capture; return the results of the iteration, which has taken effect once.

        If it fails, here or on another rank, everything is undone, and one of ``recordings`` that
        is of no use any more is taken out of them.
        """
        with in_turn(deliver_waiting):
            results = self._attempt_on(recording, recordings, captures=captures, notes=notes)
            if results is None:
                results = self._attempt_on(recording, recordings, captures=False, notes=True)
            assert results is not None  # it waits once
            if recording.graph is not None:
                if self.backend.device.type == "cpu":
                    # What would have undone it is freed by now, and the heap would keep its pages.
                    self.backend.give_back_memory()
                recording.graph.compile()
            if recording.guards is not None:
                tell_of(recording.guards.stands_still())
            return results

    def _attempt_on(
        self, recording: Recording, recordings: Recordings, *, captures: bool, notes: bool
    ) -> list[Tensor] | None:
        """Return None if a capture was undone, and all ranks are to warm up in place of it."""
        on_cpu, trains = self.backend.device.type == "cpu", recording.trains
        # CUDA rule: a capture runs nothing. On a CPU it is an iteration that may be repeated.
        copies = self._options.undo is Undo.AUTO or not trains or (captures and on_cpu)
        attempt = self.attempt(copies=copies)
        grad_norm = self.grad_norm
        # On a GPU the kernels of compiled functions are captured.
        uncompiled = as_written() if on_cpu else nullcontext()
        try:
            with uncompiled, attempt.watching(), _mode_of(self.model, trains) as own_modes:
                if captures:
                    return self._capture(recording, attempt, own_modes)
                return self._warm_up(recording, notes=notes)
        except BaseException as first:  # whatever ends it, it must leave no trace
            constants, guards = recording.constants, recording.guards
            refused = constants is not None and constants.failure is first  # other numbers
            try:
                attempt.roll_back()
                if guards is not None:
                    guards.put_back()
            finally:
                self.grad_norm = grad_norm
                recording.drop_graph()
            if not copies and not captures:
                self.torn = (
                    f"a warm-up failed ({type(first).__name__}: {first}), and with undo='none' "
                    "nobody has kept what weights and optimizer state were before it"
                )
            error = self.ranks.repeat(first) if refused and not recording.has_waited else first
            if isinstance(error, WarmUpAgainError) and recording.wait_once():
                _LOG.info("warming up once more: %s", error)
                return None
            # Where there are others, the ones that were not refused keep theirs.
            begins_anew = refused and not self.ranks.is_collective
            if begins_anew or not recording.num_eager:
                recordings.give_up(recording)
            if error is not first:
                raise error from first
            raise

    def _orders(self) -> list[Any]:
        return [root.unit_orders() for root in sharded_roots(self.model)]

    def go_by(self, orders: Sequence[Any]) -> None:
        """Have units of sharded models gather as in another iteration, not as in the last one."""
        for root, order in zip(sharded_roots(self.model), orders, strict=True):
            root.go_by_orders(order)

    def _warm_up(self, recording: Recording, *, notes: bool) -> list[Tensor]:
        watch = recording.noting(lambda: self._watch_for(recording)) if notes else nullcontext()
        recording.orders = self._orders()
        # So that what libraries and optimizers keep of a warm-up never splits what the next needs.
        self.backend.give_back_memory()
        with nvtx_range("warm-up"), self.backend.on_capture_stream() as leaving:
            results, recording.results = self.iterate(
                recording.inputs, watch, trains=recording.trains
            )
            leaving += results
        self.ranks.settle()
        self._step_together(recording)
        recording.num_eager += 1
        return results

    def _watch_for(self, recording: Recording) -> ConstantWatch:
        """Return what compares the numbers of a warm-up and of the capture after it."""
        trains, device = recording.trains, self.backend.device
        watches = trains and device.type == "cuda"
        return ConstantWatch(
            self.model,
            device,
            self.optimizer.optimizers if self.steps_inside and trains else (),
            has_run=self._has_iterated and trains,
            lands_in=self.gradients.storages() if watches else (),
            # Else other kinds of batches have graphs of their own, which may step.
            names_idle=self._options.on_change is not OnChange.RECAPTURE,
            refuse=self.refuse,
        )

    def _capture(
        self, recording: Recording, attempt: Attempt, own_modes: Callable[[], None]
    ) -> list[Tensor]:
        constants, trains = recording.constants, recording.trains
        if recording.has_waited:  # for one, since batches before this and the warm-up differ
            self.go_by(recording.orders)
        recording.orders = self._orders()
        recording.guards = guards = Guards(
            self.model,
            self._named_params,
            self.gradients.shown_views,
            optimizers=self.optimizer.optimizers if self.full and trains else (),
            functions=self._iteration.functions,
            device=self.backend.device,
            ran=Ran() if constants is None else constants.ran,
        )

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read, self.refuse)
            if constants is not None:
                constants.check_memory()
            own_modes()  # those that every later call will find
            guards.arm(was_read, self.refuse)
            self.ranks.settle()

        scratch = recording.inputs.tensors()
        if trains:
            self.before_capture()
            scratch += self.gradients.storages()
        runs, is_begun = self.backend.device.type == "cpu", False

        def iterate() -> list[Tensor]:
            nonlocal is_begun
            if is_begun:  # see Note [Compiled regions]: what turns twice would seem to stand still
                guards.put_back()
            is_begun = True
            watch = nullcontext() if constants is None else constants.comparing()
            with nullcontext() if runs else self.ranks.recording():
                tensors, recording.results = self.iterate(recording.inputs, watch, trains=trains)
            return tensors

        with nvtx_range("capture"), guards.recording():
            recording.graph, results = self.backend.record(
                iterate, self.model, check, collective=self.ranks.is_collective, scratch=scratch
            )
        recording.begin(self.gradients.num_hooks())
        if trains:
            if recording.log is None and self._options.audit:
                level = logging.INFO if self._options.audit == "auto" else logging.WARNING
                _LOG.log(level, _UNAUDITED, self._options.audit)
            recording.landed = self.gradients.landed()
            recording.kept = guards.kept
        self._step_together(recording)
        return results

    def _step_together(self, recording: Recording) -> None:
        """Step an optimizer that is not in the graph; a rank that captures does so at once."""
        if recording.trains and not self.full:
            self.step_outside()
            self.ranks.settle()

    def changes(self, guards: Guards | None = None) -> Sequence[Change]:
        """Return what is not as recordings have baked it in; without guards, of numbers alone."""
        # First, since it takes over what was loaded.
        numbers = self.optimizer.changes() if self.full else ()
        return numbers if guards is None else [*guards.changes(), *numbers]

    def before_capture(self) -> None:
        """Have the optimizer note the numbers that the graph is going to hold."""
        if self.full:
            self.optimizer.bake()
            self.optimizer.before_replay()

    def close(self) -> None:
        self.ranks.close()
        self.replayed = None
        self.gradients.close()
        for each in self._compiled:
            vars(each).pop("_compiled_call_impl", None)
        self._compiled = []


@contextmanager
def _mode_of(model: nn.Module, trains: bool) -> Iterator[Callable[[], None]]:
    """Put a model that is evaluated into its mode; hand out what gives every module its own."""
    modes = [] if trains else [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    if not trains:
        model.eval()
    try:
        yield restore
    finally:
        restore()
