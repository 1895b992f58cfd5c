"""The phases of a captured step: warm up, record once, replay."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.ahead_of_time import FirstStates, capture_ahead
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.evaluation import Evaluator
from graphfsdp._capture.outputs import Results
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.ranks.agreement import Agreement, WarmUpAgainError
from graphfsdp._capture.ranks.rank_watch import RankWatch, TogetherError
from graphfsdp._capture.ranks.standing_in import StandIn
from graphfsdp._capture.recording import Recording, Recordings, kept_by, new_of
from graphfsdp._capture.replay import Replayer
from graphfsdp._capture.report.report import CaptureReport
from graphfsdp._capture.step_report import Tally, latest_graph, make_report
from graphfsdp._capture.trace.backend import Effect, Graph
from graphfsdp._capture.undo.attempt import Attempt
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp._capture.verify import Verifier
from graphfsdp._capture.warmup import WarmUps
from graphfsdp.base.changes import Change, refuse
from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.base.sharded import sharded_roots
from graphfsdp.config import CaptureOptions, OnChange, Scope

_LOG = logging.getLogger("graphfsdp")


class StepRunner:
    """Runs iterations: eagerly at first, then one recorded, then replayed.

    Knows nothing of the CapturedStep around it, whose finaliser holds this: so a step that nobody
    holds any more is freed at once, and one that lives until Python ends is released before torch
    is taken apart.

    Attributes:
        phase: What the next call does.
        device: Where the model lies.
        groups: Process groups of the ranks that share the model.
        num_microbatches: Parts that the next batch is split into.
        breakage: Why the phase is BROKEN.
    """

    phase: Phase
    device: torch.device
    num_microbatches: int
    breakage: str

    def __init__(self, engine: Engine, options: CaptureOptions) -> None:
        self.device = engine.backend.device
        self.phase = Phase.EAGER if options.scope is Scope.NONE else Phase.WARMUP
        self.breakage = ""
        self.num_microbatches = options.microbatches
        self._engine = engine
        self._backend = engine.backend
        self._options = options
        self.groups = [g for root in sharded_roots(engine.model) for g in root.process_groups()]
        self._agreement = Agreement(self.groups)
        self._pid = os.getpid()
        self._recordings = Recordings(options.max_graphs)
        self._evaluator = Evaluator(engine, self._agreement, options.max_graphs)
        self._verifier = Verifier(engine, self._agreement)
        self._watch = RankWatch(self.groups)
        shared = (engine, self._agreement, self._watch)
        self._others = StandIn(*shared)
        self._replayer = Replayer(*shared, self._others, self._verifier, options)
        self._tally = Tally()
        self._warm_ups = WarmUps(self._recordings, options.warmup_steps)
        self._first_states: FirstStates | None = None

    @property
    def grad_norm(self) -> Tensor | None:
        """[] float32 of the last call, or None."""
        return self._engine.grad_norm

    @property
    def skipped_steps(self) -> Tensor | None:
        """[] float32, see ``CapturedStep.skipped_steps``."""
        return self._engine.skipped_steps

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Train on one batch; see ``CapturedStep.__call__``."""
        self._watch.next_call()
        try:
            recording = self._prepare(args, kwargs)
        except BaseException as error:  # of the batch, or of a guard, maybe on this rank only
            self._tell_others(error)
            raise
        if self._first_states is not None and self._first_states.are_missing:
            return self._finish_first(recording, self._first_states)
        if recording.graph is not None:
            try:
                with DeferredInterrupts():
                    return self._engine.unpack(recording, self._replay(recording))
            except TogetherError:  # with another rank, which has no graph for this call
                recording = recording.again()
                return self._engine.unpack(recording, self._attempt(recording))
        if self.phase is Phase.EAGER:
            self._engine.follow()
        if self.phase is Phase.EAGER or recording not in self._recordings:
            return self._engine.unpack(recording, self._run_eagerly(recording))
        self._others.call_together()
        return self._engine.unpack(recording, self._attempt(recording))

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Copy the batch in; return what is to be replayed, if it has a graph, or run eagerly.

        Raises:
            BatchMismatchError: there is no graph for such a batch, and there shall be no other.
            GuardError: what the graph has baked in has changed, and there shall be no other.
        """
        with nvtx_range("copy-in"):
            recording = self._recordings.load(args, kwargs, self.num_microbatches)
            recording = recording or self._recordings.new_kind(
                args, kwargs, self.num_microbatches, self.device, self._options.on_change
            )
        if self._first_states is not None and self._first_states.are_missing:
            return recording
        if recording.graph is not None:
            changes = self._engine.changes(recording)
            if changes:
                return self._after_changes(recording, changes)
        elif self._recordings.num_graphs and self._engine.baked_changes():
            self._after_changes(recording, self._engine.baked_changes())  # graphs of other kinds
        return recording

    def _tell_others(self, error: BaseException) -> None:
        """Let ranks that have begun an iteration out of it: this one cannot."""
        latest = self._recordings.latest
        if latest is not None and self.phase is not Phase.EAGER and self._agreement.is_collective:
            runs = self.device.type == "cpu" or not self._warm_ups.capture_follows(latest)
            self._others.stand_in(latest, error, runs=runs)  # a capture on a GPU runs nothing

    def capture_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture on made-up data; see ``example_batch`` of ``graphfsdp.capture``."""
        if self.phase is Phase.EAGER:
            return

        def capture() -> None:
            while not self._recordings.num_graphs:
                self.run(args, kwargs)

        try:
            self._first_states = capture_ahead(self._engine, capture)
        except BaseException:  # whatever ends it, it must leave no trace
            self._recordings.close()
            self.phase = Phase.WARMUP
            self._warm_ups.num = 0
            raise
        finally:
            self._tally.num_calls.clear()

    def _finish_first(self, recording: Recording, states: FirstStates) -> Any:
        """Run the first real iteration eagerly, for optimizers whose state begins in it."""
        again = recording.again()
        results = self._run_eagerly(again)
        if not states.adopt():
            self._give_up_graphs("the first iteration made other optimizer state than the example")
        return self._engine.unpack(again, results)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Evaluate one batch; see ``CapturedStep.evaluate``."""
        eager = self.phase is Phase.EAGER
        return self._evaluator.run(args, kwargs, self.num_microbatches, eager=eager)

    def verify(self, num_iterations: int) -> None:
        """Compare replays with eager runs; see ``CapturedStep.verify``."""
        self.graph_to("verify")
        recording = self._recordings.latest
        assert recording is not None
        refuse(self._engine.changes(recording))
        self._verifier.run(recording, num_iterations)

    def report(self, *, measure: bool) -> CaptureReport:
        """Return the facts of this step; see ``CapturedStep.report``."""
        return make_report(
            self._engine,
            self._recordings,
            self._tally,
            scope=self._options.scope.value,
            phase=self.phase.value,
            node_us=self.graph_to("measure").measure() if measure else (),
        )

    def graph_to(self, do: str) -> Graph:
        """Return the graph that was used last.

        Raises:
            PhaseError: there is none; ``do`` says what it was wanted for.
        """
        num_calls = self._options.warmup_steps + 1
        return latest_graph(self._recordings, do, self.phase.value, num_calls)

    def release(self) -> None:
        """Give everything back, the graphs first, then their pool and inputs."""
        if os.getpid() != self._pid:
            return  # a forked child holds a copy; the graphs and their streams are the parent's
        self.phase = Phase.CLOSED
        self._watch.stop()
        self._evaluator.close()
        self._recordings.close()
        self._engine.close()

    def _after_changes(self, recording: Recording, changes: Sequence[Change]) -> Recording:
        """Do what ``on_change`` says; return what to run eagerly, or to begin with anew.

        Raises:
            GuardError: ``on_change`` is "raise"; everything that has changed is named.
        """
        if self._options.on_change is OnChange.RAISE:
            refuse(changes)
        rebuilds = self._engine.needs_refresh(changes)
        what = "; ".join(str(change) for change in changes)
        if self._options.on_change is OnChange.EAGER and not rebuilds:
            _LOG.info("running eagerly: %s", what)
            return recording.again()
        self._give_up_graphs(what)
        if self._options.on_change is OnChange.EAGER:  # there is no graph to go back to
            self.phase = self.phase.to(Phase.EAGER)
        return recording

    def _give_up_graphs(self, why: str) -> None:
        _LOG.warning("all graphs are given up: %s", why)
        for entry in self._recordings:
            entry.close()
            entry.num_eager = 0
        self._engine.refresh()
        if self.phase is Phase.REPLAY:
            self.phase = self.phase.to(Phase.WARMUP)

    def _run_eagerly(self, recording: Recording) -> list[Tensor]:
        try:
            with nvtx_range("eager"), self._backend.on_capture_stream():
                results = self._engine.iterate(recording)
            self._engine.step_outside()
        except BaseException:  # also Ctrl-C, of which torch tells no forward hook
            self._engine.abandon()
            raise
        self._tally.num_calls["eager"] += 1
        return results

    def _attempt(self, recording: Recording) -> list[Tensor]:
        """Warm up or capture; undo everything if that fails, here or on another rank."""
        attempt = self._engine.attempt()
        grad_norm, results = self._engine.grad_norm, recording.results
        recording.results = Results()
        self._agreement.begin()
        self._watch.start()
        captures = recording in self._recordings and self._warm_ups.capture_follows(recording)
        count = partial(self._count, recording, time.perf_counter())
        # What fails here alone, other ranks would have kept.
        alone = not self._agreement.is_collective
        waiting = self._engine.waiting_steps(is_first=not self._warm_ups.num) if alone else ()
        try:
            with attempt.keeping(waiting=waiting, count=count):
                return self._capture(recording, attempt) if captures else self._warm_up(recording)
        except BaseException as first:  # whatever ends it, it must leave no trace
            if attempt.effect is not Effect.NONE:  # it failed at its end, or a signal has waited
                self._break(attempt.breakage(first))
                raise
            with DeferredInterrupts():
                attempt.roll_back()
                self._engine.grad_norm, recording.results = grad_norm, results
                recording.drop_graph()
                self.phase = Phase.REPLAY if self._recordings.num_graphs else Phase.WARMUP
            refused = recording.refused_values(first)
            error = self._agreement.repeat(first) if refused and not recording.has_waited else first
            waits = isinstance(error, WarmUpAgainError) and recording.wait_once()
            # Where there are others, the ones that were not refused keep theirs.
            begins_anew = refused and not self._agreement.is_collective
            if not waits and (begins_anew or not recording.num_eager):
                self._recordings.remove(recording)
            if not waits:
                raise self._others.attempt_failed(error)  # noqa: B904, mostly the same one
            _LOG.info("warming up once more: %s", error)
        return self._attempt(recording)

    def _count(self, recording: Recording, started: float) -> None:
        took_ms = (time.perf_counter() - started) * 1e3
        self._tally.add(recording.graph, took_ms, self._warm_ups.count(recording))

    def _warm_up(self, recording: Recording) -> list[Tensor]:
        watch = None
        is_next = self._warm_ups.capture_follows(recording, 1) or len(self._recordings) > 1
        if is_next or self._engine.steps_inside:
            watch = recording.noting(self._engine.constant_watch())
        with nvtx_range("warm-up"), self._backend.on_capture_stream():
            results = self._engine.iterate(recording, watch)
        self._others.settle_beside_captures()
        return results

    def _capture(self, recording: Recording, attempt: Attempt) -> list[Tensor]:
        self.phase = self.phase.to(Phase.CAPTURE)
        engine = self._engine
        recording.guards = guards = engine.guards()

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read)
            recording.check_memory()
            guards.arm(was_read)
            if self._agreement.settle():
                raise WarmUpAgainError("another rank was given other numbers")

        if engine.full:
            engine.optimizer.before_replay()
            engine.optimizer.bake()
        before = kept_by(engine.model)
        with nvtx_range("capture"), guards.recording():
            graph, results = self._backend.record(
                lambda: engine.iterate(recording, recording.comparing()),
                engine.model,
                check,
                collective=self._agreement.is_collective,
                scratch=[*engine.gradients.storages(), *recording.inputs.tensors()],
                undo=self._options.undo_replays,
            )
        self._replayer.prepare(graph)
        recording.graph, recording.landed = graph, engine.gradients.landed()
        recording.kept, recording.constants = new_of(kept_by(engine.model), before), None
        if not engine.full:
            engine.step_outside()
            self._agreement.settle()
        self.phase = self.phase.to(Phase.REPLAY)
        return results

    def _replay(self, recording: Recording) -> list[Tensor]:
        try:
            results = self._replayer.run(recording)
        finally:
            self._break(self._replayer.breakage)
        self._tally.num_calls["replay"] += 1
        return results

    def _break(self, why: str) -> None:
        if why:
            self.phase, self.breakage = self.phase.to(Phase.BROKEN), why
