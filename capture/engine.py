"""Everything that an iteration needs, and one iteration of it over given inputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp._capture.cuda.regions import CompiledRegions
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.guards.guards import Guards
from graphfsdp._capture.guards.modules import join, weights_of
from graphfsdp._capture.guards.names import ReadNames
from graphfsdp._capture.guards.walk import walk
from graphfsdp._capture.inputs import StaticInputs, TensorLeaf
from graphfsdp._capture.iteration import Iteration
from graphfsdp._capture.messages import messages_as_operators
from graphfsdp._capture.recording import Recording, Results
from graphfsdp._capture.rules.constants import ConstantWatch
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp._capture.trace.ran import Ran
from graphfsdp._capture.undo.host_state import Attempt
from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.changes import Change
from graphfsdp.base.recomputation import torchs_checkpoints_as_ours
from graphfsdp.base.sharded import main_grads_of, put_back, sharded_roots, units_of
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, OnChange, Scope, Undo
from graphfsdp.errors import CaptureError, GuardError, Refuse, raised


class Engine:
    """A model with its optimizer and persistent gradients.

    Attributes:
        backend: Records, and knows the device.
        units: Of sharded models; what the user has unsharded by hand is put back before each run.
        full: The optimizer steps inside the graph.
        refuse: Raises what a capture finds behind its iteration; a check notes it.
        grad_norm: [] float32 of the last iteration, or None.
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
        regions: CompiledRegions | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.backend = backend
        self._find_params = find_params
        self.units = units_of(model)
        put_back(self.units)
        self._policy = policy
        self._make_iteration = make_iteration
        self._take_gradients()
        self.full = options.scope is Scope.FULL_ITERATION
        self.undoes = options.undo is Undo.AUTO
        self.refuse: Refuse = raised
        self.grad_norm: Tensor | None = None
        self._replayed: Recording | None = None  # by the last run
        self._has_iterated = False
        self._has_stepped = False
        self._captures = options.scope is not Scope.NONE
        # Else other kinds of batches have graphs of their own, which may step.
        self._has_one_graph = options.on_change is not OnChange.RECAPTURE
        self._regions = regions

    def _take_gradients(self) -> None:
        self._named_params = dict(self._find_params())
        self._trained = list(self._named_params.values())
        self._forms = list(map(TensorLeaf.of, self._trained))
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
        if follows and list(map(id, self._find_params().values())) != list(map(id, self._trained)):
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
        self._replayed = None
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
            self.backend.give_back_memory(workspaces=self._captures)

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
            with self.backend.on_capture_stream():
                self.grad_norm = self._iteration.optimizer_step()

    @property
    def steps_inside(self) -> bool:
        return self._iteration.steps_inside

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of ranks that make an iteration together."""
        of_shards = [g for root in sharded_roots(self.model) for g in root.process_groups()]
        return [*of_shards, *self._iteration.groups]

    def constant_watch(self, *, trains: bool = True) -> ConstantWatch:
        """Return what compares the numbers of a warm-up and of the capture after it."""
        stepping = self.optimizer.optimizers if self.steps_inside and trains else ()
        has_run = self._has_iterated and trains
        device = self.backend.device
        watches = trains and device.type == "cuda"
        return ConstantWatch(
            self.model,
            device,
            stepping,
            has_run=has_run,
            lands_in=self.gradients.storages() if watches else (),
            names_idle=self._has_one_graph,
            refuse=self.refuse,
        )

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
            counts=self.optimizer.counts,
            device=self.backend.device,
            restore_gradients=self.gradients.save_bindings(),
        )

    def around(self) -> Iterator[Tensor]:
        """Yield the tensors that the functions of the iteration lead to, outside of the model."""
        found = walk(ReadNames(Ran()), self.model, self._iteration.functions)
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

    def guards(self, ran: Ran, *, trains: bool = True) -> Guards:
        """Return what is to be armed when an iteration, or its forward alone, was recorded.

        ``ran``: the code of its warm-up.
        """
        return Guards(
            self.model,
            self._named_params,
            self.gradients.shown_views,
            optimizers=self.optimizer.optimizers if self.full and trains else (),
            counts=self.optimizer.counts,
            functions=self._iteration.functions,
            device=self.backend.device,
            ran=ran,
        )

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

    def before_replay(self, recording: Recording) -> None:
        """Bring what a replay reads up to date, and put the gradients where the user looks.

        ``changes`` comes before.
        """
        if self.full:
            self.optimizer.before_replay()
        self.gradients.rebind(recording.landed)
        if self._replayed is not recording:  # somebody's eager run may have put others there
            for module, name, tensor in recording.kept:
                vars(module)[name] = tensor
            self._replayed = recording

    def after_replay(self) -> None:
        """Do what Python does after an iteration, and a replay does not."""
        # A replay writes the parameters behind autograd's back. With this, a backward pass
        # through a graph that was made before the replay is an error, as it is in eager mode.
        torch.autograd.graph.increment_version(self._trained)
        if self.full:
            self.optimizer.after_replay()
        else:
            self.step_outside()

    def close(self) -> None:
        self._replayed = None
        self.gradients.close()
        if self._regions is not None:
            self._regions.close()
