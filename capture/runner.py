"""The phases of a captured step: warm up, record once, replay."""

import enum
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.audit import Auditor
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.guards.moves import put_back as put_kept_back
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.recording import Recording, Recordings
from graphfsdp._capture.report.report import CaptureReport, MemoryNames
from graphfsdp._capture.trace.backend import Effect, GraphFacts
from graphfsdp._capture.trace.program_facts import Role
from graphfsdp._capture.trees import copied
from graphfsdp._capture.undo.host_state import save_random_states
from graphfsdp._capture.verify import Verifier
from graphfsdp.base.progress import shown_when_slow
from graphfsdp.base.protocols import Restartable, put_back, sharded_roots
from graphfsdp.base.streams import nvtx_range
from graphfsdp.config import CaptureOptions, OnChange, Scope
from graphfsdp.errors import (
    Change,
    ChangeKind,
    GuardError,
    PhaseError,
    VerificationError,
    split_remedy,
)

_LOG = logging.getLogger("graphfsdp")
_MAX_SHOWN = 8  # changes in a message
_Slots = dict[str, Any]  # what an optimizer keeps of a parameter
# What decides which collectives an iteration has, and in which order, and what becomes of the sums.
_SAME_ON_ALL_RANKS = ("warmup_steps", "microbatches", "max_grad_norm", "skip_nonfinite", "verify")
# After such a change there are other gradients to keep.
_REBUILT = (
    *(ChangeKind.GROUPS, ChangeKind.REQUIRES_GRAD, ChangeKind.STRUCTURE),
    *(ChangeKind.ADDRESS, ChangeKind.LAYOUT),
)


class Phase(enum.Enum):
    """What the next call of a captured step does."""

    WARMUP = "warmup"  # runs eagerly; after enough of these, the next call captures
    CAPTURE = "capture"  # is recording now
    REPLAY = "replay"  # launches the graph
    EAGER = "eager"  # scope "none": runs eagerly for ever
    BROKEN = "broken"  # an iteration stopped while it updated weights; refuses
    CLOSED = "closed"  # refuses


class Runner:
    """Runs iterations: eagerly at first, then one recorded, then replayed.

    Knows nothing of the CapturedStep around it: so a step that nobody holds any more is freed at
    once, or by the collector where its model refers to it.

    Attributes:
        num_microbatches: Parts that the next batch is split into.
        breakage: Why the phase is BROKEN.
    """

    def __init__(self, engine: Engine, options: CaptureOptions) -> None:
        self.device = engine.backend.device
        self.phase = Phase.EAGER if options.scope is Scope.NONE else Phase.WARMUP
        self.breakage = ""
        self.num_microbatches = options.microbatches
        self._engine = engine
        self._backend = engine.backend
        self._options = options
        self._ranks = engine.ranks
        self._options_of_all: dict[str, object] = {
            **{name: getattr(options, name) for name in _SAME_ON_ALL_RANKS},
            **{"scope": options.scope.value, "example_batch": None, "schedule": engine.schedule},
        }
        self._pid = os.getpid()
        most = options.max_graphs
        on_change = options.on_change
        if self.phase is Phase.EAGER and on_change is OnChange.RECAPTURE:
            on_change = OnChange.EAGER  # no kind of batch will ever have a graph
        self._recordings = Recordings(most, self.device, on_change)
        self._evaluations = Recordings(most, self.device, OnChange.RECAPTURE, trains=False)
        self._verifier = Verifier(engine, self._ranks)
        self._outdated = ""  # why the graphs are to be given up
        self._auditor = Auditor(engine, options.audit, collective=self._ranks.is_collective)
        self._num_calls: Counter[str] = Counter()  # by what they did
        self._num_captures = self._num_warm_ups = 0  # that have taken effect
        self._capture_ms: float | None = None  # that the last one took
        self._warmup_ms = 0.0  # that all have taken
        self._facts = GraphFacts(None, None)  # of the last graph, also when it is gone
        self._first_states: FirstStates | None = None  # until the first iteration has made them

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._ranks.is_collective:
            return self._run(args, kwargs)
        is_eager = self.phase is Phase.EAGER
        with nullcontext() if is_eager else self._together("iteration"):
            self._ranks.refuse_other_options(self._options_of_all)
            return self._run(args, kwargs)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Run the body, which all ranks run together; break if no rank can go on after it."""
        try:
            with self._ranks.call(what):
                yield
        finally:
            self._break(self._ranks.lost)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find what was recorded of such batches, ask whether it holds, and replay it."""
        engine = self._engine
        if self._outdated:
            self._follow_audit()
        if engine.units and self.phase is not Phase.EAGER:
            put_back(engine.units)
        if self.phase is Phase.WARMUP:  # later guards notice it
            engine.check_parameters(follows=False)
        recording = self._recordings.find(args, kwargs, self.num_microbatches)
        graph, inputs = recording.graph, recording.inputs
        if graph is None or self._first_states is not None:
            return self._run_python(recording)
        changes = engine.changes(recording.guards)
        if changes:
            return self._run_python(recording, eagerly=self._after_changes(changes))
        with nvtx_range("copy-in"):
            inputs.load()
        if self._auditor.every and self._auditor.is_due(recording):
            return self._audit(recording)
        if self._ranks.is_collective:
            self._ranks.note_replay()
        self._before_replay(recording)
        verifies = recording.num_verified < self._options.verify
        try:
            with nvtx_range("replay"):
                results = self._verifier.replay(recording) if verifies else graph.replay()
        except VerificationError:
            raise
        except BaseException as error:  # of an operator, of a collective, or no memory
            self._after_failure(graph.effect, error)
            raise
        recording.num_verified += verifies
        recording.num_replays += 1
        self._num_calls["replay"] += 1
        self._after_replay()
        return engine.unpack(recording.results, results)

    def _before_replay(self, recording: Recording) -> None:
        """Bring what a replay reads up to date, and put the gradients where the user looks."""
        engine = self._engine
        if engine.full:
            engine.optimizer.before_replay()
        engine.gradients.rebind(recording.landed)
        if engine.replayed is not recording:  # somebody's eager run may have put others there
            put_kept_back(recording.kept)
            engine.replayed = recording

    def _after_replay(self) -> None:
        """Do what Python does after an iteration, and a replay does not."""
        engine = self._engine
        # A replay writes the parameters behind autograd's back. With this, a backward pass
        # through a graph that was made before the replay is an error, as it is in eager mode.
        torch.autograd.graph.increment_version(engine.trained)
        engine.step_outside()

    def _run_python(self, recording: Recording, *, eagerly: bool = False) -> Any:
        """Warm up, capture, or run ``eagerly``, as what has no graph to come does."""
        engine, states = self._engine, self._first_states
        if recording.graph is None and states is None and self._recordings.num_graphs:
            changes = engine.changes()
            if changes:  # of what graphs of other kinds of batches have baked in
                self._after_changes(changes)
        with nvtx_range("copy-in"):
            recording.inputs.load()
        if self.phase is Phase.EAGER:
            engine.check_parameters(follows=True)
        is_kept = self.phase is not Phase.EAGER and recording in self._recordings
        with engine.gradients.shown():
            if is_kept and not eagerly and states is None:
                results, form = self._attempt(recording), recording.results
            else:
                with nvtx_range("eager"), self._as_written() as leaving:
                    results, form = engine.iterate(recording.inputs)
                    leaving += results
                self._num_calls["eager"] += 1
        if states is not None:
            self._first_states = None
            if not states.adopt():
                self._give_up_graphs(
                    "the first iteration made other optimizer state than the example"
                )
        return engine.unpack(form, results)

    @contextmanager
    def _as_written(self) -> Iterator[list[Tensor]]:
        """Run the body, an iteration that nobody undoes, on the stream of captures.

        Into the list go its results.
        """
        try:
            with self._backend.on_capture_stream() as results:
                yield results
            self._engine.step_outside()
        except BaseException:  # also Ctrl-C, of which torch tells no forward hook
            for root in sharded_roots(self._engine.model):
                root.abandon_iteration()
            raise

    def _audit(self, recording: Recording) -> Any:
        """Run an iteration as written; GuardError if it is no longer the recorded one.

        One that fails is not undone: copies of all that it writes would be most of its memory.
        """
        try:
            with self._as_written() as leaving:
                form, results, difference = self._auditor.run(recording)
                leaving += results
        except BaseException as error:
            error.add_note(
                "graphfsdp: this call was audited: it ran as written, and what it has changed "
                "stays changed, as in a loop without a graph"
            )
            raise
        self._num_calls["audit"] += 1
        output = self._engine.unpack(form, results)
        if difference and self._options.on_change is OnChange.RAISE:
            raise GuardError(difference)
        self._outdated = split_remedy(difference)[0]
        return output

    def _follow_audit(self) -> None:
        """Do what ``on_change`` says of what an audit has found, once its gradients were seen."""
        self._give_up_graphs(self._outdated)
        self._outdated = ""
        if self._options.on_change is OnChange.EAGER:
            self.phase = Phase.EAGER

    def capture_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture on made-up data, then put everything back, also after an error.

        See ``example_batch`` of ``graphfsdp.capture``.
        """
        if self.phase is Phase.EAGER:
            return
        engine = self._engine
        self._options_of_all["example_batch"] = "a batch"
        states = FirstStates(engine.optimizer.optimizers)
        try:
            with engine.attempt(beside=engine.around()).undone():
                while not self._recordings.num_graphs:
                    self.run(*copied((args, kwargs)))  # as it is given: it may be written into
                states.note()
            is_first_eager = states.put_back()
        except BaseException:  # whatever ends it, it must leave no trace
            self._recordings.close()
            if self.phase is not Phase.BROKEN:
                self.phase = Phase.WARMUP
            self._num_warm_ups = 0
            raise
        finally:
            self._num_calls.clear()
        engine.grad_norm = None
        self._first_states = states if is_first_eager else None

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass alone, which leaves no trace in what is trained.

        The model is in evaluation mode meanwhile; afterwards every module has its own mode again,
        and every generator the state that it had.
        """
        with self._together("evaluation"):
            restore = save_random_states(self._engine.model, self.device)
            try:
                with nvtx_range("evaluate"):
                    recording = self._evaluations.find(args, kwargs, self.num_microbatches)
                    recording.inputs.load()
                    results = self._evaluate(recording)
            finally:
                restore()
            return recording.results.unflatten(results)[0]

    def _evaluate(self, recording: Recording) -> list[Tensor]:
        if recording.graph is not None and recording.guards is not None:
            changes = recording.guards.changes()
            # Modes do not count: an evaluation sets them.
            others = [change for change in changes if change.kind is not ChangeKind.MODE]
            if not others:
                return recording.graph.replay()
            _LOG.info("evaluation: another graph, %s", others[0])
            recording.close()
        captures = self.phase is not Phase.EAGER and recording.num_eager > 0
        return self._engine.attempt_on(recording, self._evaluations, captures=captures, notes=True)

    def verify(self, num_iterations: int) -> None:
        recording = self._recordings.latest
        if recording is None or recording.graph is None:
            raise PhaseError(
                f"there is no graph to verify in phase {self.phase.value}. Remedy: call the step "
                f"until it has captured ({self._options.warmup_steps + 1} calls)"
            )
        _refuse(self._engine.changes(recording.guards))
        grad_norm = self._engine.grad_norm
        try:
            with self._together("verification"), self._verifier.undone(recording):
                for _ in range(num_iterations):
                    self._before_replay(recording)
                    self._verifier.replay(recording)
                    self._after_replay()
        finally:  # a step outside of the graph has taken one as well
            self._engine.grad_norm = grad_norm

    def report(self) -> CaptureReport:
        """Report on the graph that was used last."""
        facts, num_calls = self._facts, dict(self._num_calls)
        latest = self._recordings.latest
        if latest is not None and latest.graph is not None:
            facts = latest.graph.facts
        inputs = None if latest is None else latest.inputs
        started = bool(sum(num_calls.values()))
        return CaptureReport(
            backend=self._engine.backend.name,
            scope=self._options.scope.value,
            phase=self.phase.value,
            num_calls=num_calls,
            num_captures=self._num_captures,
            num_nodes=facts.num_nodes,
            num_ops=facts.num_ops,
            op_counts=facts.op_counts,
            capture_ms=self._capture_ms,
            warmup_ms=self._warmup_ms,
            static_input_bytes=sum(entry.inputs.num_bytes for entry in self._recordings),
            gradient_bytes=self._engine.gradients.num_bytes,
            pool_bytes=facts.pool_bytes,
            num_escapes=facts.num_escapes,
            inputs={} if inputs is None else inputs.describe(),
            without_gradient=tuple(self._engine.gradients.without_gradient()) if started else (),
            compiled=facts.compiled,
            program=facts.program,
            names=MemoryNames(_named_tensors(self._engine, inputs)),
        )

    def release(self) -> None:
        """Give everything back, the graphs first, then their pool and inputs."""
        if self.phase is Phase.CLOSED:
            return
        if os.getpid() != self._pid:
            return  # a forked child holds a copy; the graphs and their streams are the parent's
        self.phase = Phase.CLOSED
        self._evaluations.close()
        self._recordings.close()
        self._engine.close()  # until here ranks watch: graphs wait for what is in flight

    def __del__(self) -> None:
        if hasattr(self, "_first_states"):  # else the constructor has failed
            self.release()

    def _after_changes(self, changes: Sequence[Change]) -> bool:
        """Do what ``on_change`` says; return whether graphs are kept, and this call has none."""
        if self._options.on_change is OnChange.RAISE:
            _refuse(changes)
        rebuilds = any(change.kind in _REBUILT for change in changes)
        what = "; ".join(str(change) for change in changes)
        if self._options.on_change is OnChange.EAGER and not rebuilds:
            _LOG.info("running eagerly: %s", what)
            return True
        remedies = "; ".join(dict.fromkeys(change.remedy for change in changes))
        self._give_up_graphs(f"{what}. Remedy, should it go on changing: {remedies}")
        if self._options.on_change is OnChange.EAGER:  # there is no graph to go back to
            self.phase = Phase.EAGER
        return False

    def _give_up_graphs(self, why: str) -> None:
        _LOG.warning("all graphs are given up: %s", why)
        for entry in self._recordings:
            entry.close()
            entry.num_eager = 0
        self._engine.refresh()
        if self.phase is Phase.REPLAY:
            self.phase = Phase.WARMUP

    def _attempt(self, recording: Recording) -> list[Tensor]:
        self._ranks.begin_attempt()
        started = time.perf_counter()
        captures = self._capture_follows(recording)
        if captures and self._options.warmup_steps and recording.constants is None:
            captures = False  # its warm-ups were not the last ones, and nobody has noted them
        is_last = self._capture_follows(recording, 1) or len(self._recordings) > 1
        if captures:
            self.phase = Phase.CAPTURE
            _LOG.info("capturing the iteration")
        try:
            with shown_when_slow("capturing the iteration") if captures else nullcontext():
                results = self._engine.attempt_on(
                    recording,
                    self._recordings,
                    captures=captures,
                    notes=is_last or self._engine.steps_inside,
                )
        finally:
            self.phase = Phase.REPLAY if self._recordings.num_graphs else Phase.WARMUP
            self._break(self._engine.torn)
        took_ms = (time.perf_counter() - started) * 1e3
        if recording.graph is None:
            self._num_warm_ups += 1
            self._warmup_ms += took_ms
        else:
            self._num_captures += 1
            self._facts, self._capture_ms = recording.graph.facts, took_ms
            _LOG.info("captured %s nodes", self._facts.num_nodes)
        self._num_calls["warmup" if recording.graph is None else "capture"] += 1
        return results

    def _capture_follows(self, recording: Recording, num_more: int = 0) -> bool:
        """Tell whether so many warm-ups from now the next call with such a batch captures.

        Each kind of batch has one warm-up at least, unless none are wanted.
        """
        num_wanted = self._options.warmup_steps
        is_warm = self._num_warm_ups + num_more >= num_wanted
        return is_warm and recording.num_eager + num_more >= min(num_wanted, 1)

    def _after_failure(self, effect: Effect, error: BaseException) -> None:
        again = ""
        if effect is Effect.NONE:
            self._engine.gradients.drop()
            again = "" if self._ranks.is_collective else ". The step can be called again"
        elif effect is Effect.PART:
            self._break(f"{type(error).__name__}: {effect.value}")
        error.add_note(f"graphfsdp: {effect.value}{again}")

    def _break(self, why: str) -> None:
        if why and self.phase is not Phase.BROKEN:
            self.breakage = why
            self.phase = Phase.BROKEN


def _named_tensors(
    engine: Engine, inputs: StaticInputs | None
) -> Iterator[tuple[Role, str, Tensor]]:
    for name, param in engine.model.named_parameters():
        yield Role.PARAMETER, name, param
    for name, view in engine.gradients.named_views():
        yield Role.GRADIENT, f"gradient of {name}", view
    for name, buffer in engine.model.named_buffers():
        yield Role.BUFFER, name, buffer
    for name, state in engine.optimizer.state_tensors():
        yield Role.STATE, name, state
    for name, tensor in () if inputs is None else inputs.named_tensors():
        yield Role.INPUT, name, tensor


def _refuse(changes: Sequence[Change]) -> None:
    """Raise a GuardError that names and holds all changes, if there are any."""
    if not changes:
        return
    remedies = "; ".join(dict.fromkeys(change.remedy for change in changes[:_MAX_SHOWN]))
    lines = [str(change) for change in changes[:_MAX_SHOWN]]
    if len(changes) > _MAX_SHOWN:
        lines.append(f"and {len(changes) - _MAX_SHOWN} more")
    text = f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n  {line}" for line in lines) + "\n"
    raise GuardError(
        f"a replay would not see this, so it was not run:{text}Remedy: {remedies}; or capture "
        "again, as on_change='recapture' does",
        changes,
    )


class FirstStates:
    """Optimizer state that an ahead-of-time capture has made, and that the graph writes.

    Note [State before the first step]: the graph has the addresses of state that optimizers made
    on the example batch. An optimizer that knows how state begins (FusedAdam) gives it these
    values. Of any other, only its own first step knows: so the first real iteration runs eagerly,
    without state, as it would have, and what it has made is then moved to where the graph is.
    """

    def __init__(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self._had = [(optimizer, set(optimizer.state)) for optimizer in optimizers]
        self._made: list[tuple[torch.optim.Optimizer, dict[Tensor, _Slots]]] = []

    def note(self) -> None:
        """Note what was made since; it is about to be undone."""
        for optimizer, had in self._had:
            made = {param: state for param, state in optimizer.state.items() if param not in had}
            if made:
                self._made.append((optimizer, made))

    def put_back(self) -> bool:
        """Give optimizers their state where they know its values; tell whether others wait."""
        waiting = []
        for optimizer, made in self._made:
            if isinstance(optimizer, Restartable):
                optimizer.state.update(made)
                optimizer.restart_states(made)
            else:
                waiting.append((optimizer, made))
        self._made = waiting
        return bool(waiting)

    def adopt(self) -> bool:
        """Move what the first eager iteration has made to where the graph writes.

        False if it made other state than on the example batch: the graph is of no use then.
        """
        for optimizer, made in self._made:
            new = {param: state for param, state in optimizer.state.items() if param in made}
            if new.keys() != made.keys() or len(optimizer.state) != len(new):
                return False
            for param, state in new.items():
                if not _move(state, made[param]):
                    return False
            optimizer.state.update(made)
        return True


def _move(state: _Slots, target: _Slots) -> bool:
    if state.keys() != target.keys():
        return False
    for key, value in state.items():
        old = target[key]
        if not isinstance(value, Tensor) or not isinstance(old, Tensor):
            target[key] = value
        elif value.shape != old.shape or value.dtype != old.dtype:
            return False
        else:
            old.copy_(value)
    return True
