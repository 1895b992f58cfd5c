"""The phases of a captured step: warm up, record once, replay."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp._capture.ahead_of_time import FirstStates, capture_ahead
from graphfsdp._capture.attempts import Attempts, Evaluator
from graphfsdp._capture.audit import Auditor
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.ranks.ranks import Ranks
from graphfsdp._capture.recording import Recording, Recordings
from graphfsdp._capture.report.report import CaptureReport
from graphfsdp._capture.step_report import Tally, make_report
from graphfsdp._capture.trace.backend import Effect, Graph
from graphfsdp._capture.trees import copied
from graphfsdp._capture.undo.interrupts import deliver_waiting
from graphfsdp._capture.verify import Verifier
from graphfsdp.base.changes import Change, ChangeKind, refuse
from graphfsdp.base.progress import shown_when_slow
from graphfsdp.base.streams import nvtx_range
from graphfsdp.config import CaptureOptions, OnChange, Scope
from graphfsdp.errors import GuardError, PhaseError, VerificationError, split_remedy

_LOG = logging.getLogger("graphfsdp")
# A graph that a number of the optimizer ends before so many replays has not paid for its capture;
# when so many in a row have not, the next one will not either.
_REPLAYS_THAT_PAY = 10
_MOST_SHORT_LIVED = 5


class StepRunner:
    """Runs iterations: eagerly at first, then one recorded, then replayed.

    Knows nothing of the CapturedStep around it: so a step that nobody holds any more is freed at
    once, or by the collector where its model refers to it.

    Attributes:
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
        self.groups = engine.groups
        self._ranks = Ranks(self.groups, deliver_waiting, self.device.type)
        self._pid = os.getpid()
        self._recordings = Recordings(options.max_graphs, self.device, options.on_change)
        self._attempts = Attempts(engine, self._ranks, self._recordings, trains=True)
        self._evaluator = Evaluator(engine, self._ranks, options.max_graphs)
        self._verifier = Verifier(engine, self._ranks)
        self._outdated = ""  # why the graphs are to be given up
        self._auditor = Auditor(engine, options.audit, collective=self._ranks.is_collective)
        self._tally = Tally()
        self._num_warm_ups = 0  # that have taken effect
        self._num_short_lived = 0  # graphs in a row; see _MOST_SHORT_LIVED
        self._replays_before = 0  # the graphs that there are were captured
        self._first_states: FirstStates | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.phase is Phase.EAGER or not self._ranks.is_collective:
            return self._run(args, kwargs)
        with self._together("iteration"):
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
        if self._outdated:
            self._follow_audit()
        if self.phase is not Phase.EAGER:
            self._engine.put_back_units()
        if self.phase is Phase.WARMUP:  # later guards notice it
            self._engine.refuse_other_parameters()
        recording = self._find(args, kwargs)
        with nvtx_range("copy-in"):
            recording.inputs.load()
        if self._first_states is not None and self._first_states.are_missing:
            return self._finish_first(recording, self._first_states)
        if recording.graph is not None and self._auditor.is_due(recording):
            return self._audit(recording)
        if recording.graph is not None:
            return self._engine.unpack(recording, self._replay(recording, recording.graph))
        if self.phase is Phase.EAGER:
            self._engine.follow()
        is_eager = self.phase is Phase.EAGER or recording not in self._recordings
        with self._engine.gradients.shown():
            results = self._run_eagerly(recording) if is_eager else self._attempt(recording)
        return self._engine.unpack(recording, results)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Return what is to be replayed, if it has a graph, or run eagerly."""
        recording = self._recordings.find(args, kwargs, self.num_microbatches)
        if self._first_states is not None and self._first_states.are_missing:
            return recording
        if recording.graph is not None:
            changes = self._engine.changes(recording)
            if changes:
                return self._after_changes(recording, changes)
        elif self._recordings.num_graphs and self._engine.baked_changes():
            self._after_changes(recording, self._engine.baked_changes())  # graphs of other kinds
        return recording

    def _audit(self, recording: Recording) -> Any:
        """Run an iteration as written; GuardError if it is no longer the recorded one."""
        try:
            with self._backend.on_capture_stream():
                audited, results, difference = self._auditor.run(recording)
            self._engine.step_outside()
        except BaseException:  # also Ctrl-C, of which torch tells no forward hook
            self._engine.abandon()
            raise
        self._tally.num_calls["audit"] += 1
        output = self._engine.unpack(audited, results)
        if difference and self._options.on_change is OnChange.RAISE:
            raise GuardError(difference)
        self._outdated = split_remedy(difference)[0]
        return output

    def _follow_audit(self) -> None:
        """Do what ``on_change`` says of what an audit has found, once its gradients were seen."""
        self._give_up_graphs(self._outdated)
        self._outdated = ""
        if self._options.on_change is OnChange.EAGER:
            self._go_to(Phase.EAGER)

    def capture_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture on made-up data; see ``example_batch`` of ``graphfsdp.capture``."""
        if self.phase is Phase.EAGER:
            return

        def capture() -> None:
            while not self._recordings.num_graphs:
                self.run(*copied((args, kwargs)))  # as it is given: it may be written into

        try:
            self._first_states = capture_ahead(self._engine, capture)
        except BaseException:  # whatever ends it, it must leave no trace
            self._recordings.close()
            if self.phase is not Phase.BROKEN:
                self._go_to(Phase.WARMUP)
            self._num_warm_ups = 0
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
        eager = self.phase is Phase.EAGER
        with self._together("evaluation"):
            return self._evaluator.run(args, kwargs, self.num_microbatches, eager=eager)

    def verify(self, num_iterations: int) -> None:
        self.graph_to("verify")
        recording = self._recordings.latest
        assert recording is not None
        refuse(self._engine.changes(recording))
        with self._together("verification"):
            self._verifier.run(recording, num_iterations)

    def report(self, *, measure: bool) -> CaptureReport:
        return make_report(
            self._engine,
            self._recordings,
            self._tally,
            scope=self._options.scope.value,
            phase=self.phase.value,
            node_us=self.graph_to("measure").measure() if measure else (),
        )

    def graph_to(self, do: str) -> Graph:
        """Return the graph that was used last; PhaseError says what it was wanted for (``do``)."""
        latest = self._recordings.latest
        if latest is None or latest.graph is None:
            raise PhaseError(
                f"there is no graph to {do} in phase {self.phase.value}. Remedy: call the step "
                f"until it has captured ({self._options.warmup_steps + 1} calls)"
            )
        return latest.graph

    def release(self) -> None:
        """Give everything back, the graphs first, then their pool and inputs."""
        if self.phase is Phase.CLOSED:
            return
        if os.getpid() != self._pid:
            return  # a forked child holds a copy; the graphs and their streams are the parent's
        self._go_to(Phase.CLOSED)
        self._evaluator.close()
        self._recordings.close()
        self._ranks.close()  # until here it watches: graphs wait for what is in flight
        self._engine.close()

    def __del__(self) -> None:
        if hasattr(self, "_first_states"):  # else the constructor has failed
            self.release()

    def _after_changes(self, recording: Recording, changes: Sequence[Change]) -> Recording:
        """Do what ``on_change`` says; return what to run eagerly, or to begin with anew."""
        if self._options.on_change is OnChange.RAISE:
            refuse(changes)
        rebuilds = self._engine.needs_refresh(changes)
        what = "; ".join(str(change) for change in changes)
        if self._options.on_change is OnChange.EAGER and not rebuilds:
            _LOG.info("running eagerly: %s", what)
            return recording.again()
        if all(change.kind is ChangeKind.BAKED_VALUE for change in changes):
            self._refuse_useless(changes)
        self._give_up_graphs(what)
        if self._options.on_change is OnChange.EAGER:  # there is no graph to go back to
            self._go_to(Phase.EAGER)
        return recording

    def _refuse_useless(self, changes: Sequence[Change]) -> None:
        """Count graphs that numbers of the optimizer end early; GuardError after some in a row."""
        num_replays = self._tally.num_calls["replay"]
        if num_replays - self._replays_before >= _REPLAYS_THAT_PAY:
            self._num_short_lived = 0
        elif self._num_short_lived == _MOST_SHORT_LIVED:
            refuse(
                changes,
                f"capturing again is useless: {_MOST_SHORT_LIVED} graphs in a row were given up "
                f"after fewer than {_REPLAYS_THAT_PAY} replays, since a number that they have "
                "baked in goes on changing",
                otherwise="",
            )
        elif self._num_short_lived == 1:  # the second one in a row
            remedies = "; ".join(dict.fromkeys(change.remedy for change in changes))
            _LOG.warning(
                "a number that graphs have baked in goes on changing, and each new graph takes a "
                "capture. Remedy: %s",
                remedies,
            )
        self._num_short_lived += 1
        self._replays_before = num_replays

    def _give_up_graphs(self, why: str) -> None:
        _LOG.warning("all graphs are given up: %s", why)
        for entry in self._recordings:
            entry.close()
            entry.num_eager = 0
        self._engine.refresh()
        if self.phase is Phase.REPLAY:
            self._go_to(Phase.WARMUP)

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
        self._ranks.begin_attempt()
        started = time.perf_counter()
        captures = self._capture_follows(recording)
        is_last = self._capture_follows(recording, 1) or len(self._recordings) > 1
        if captures:
            self._go_to(Phase.CAPTURE)
        try:
            with self._shown() if captures else nullcontext():
                results = self._attempts.run(
                    recording, captures=captures, notes=is_last or self._engine.steps_inside
                )
        finally:
            self._go_to(Phase.REPLAY if self._recordings.num_graphs else Phase.WARMUP)
            self._break(self._attempts.torn)
        self._num_warm_ups += recording.graph is None
        took_ms = (time.perf_counter() - started) * 1e3
        self._tally.add(recording.graph, took_ms)
        return results

    def _shown(self) -> AbstractContextManager[None]:
        """Show a capture that takes long on the terminal of the first rank."""
        if dist.is_initialized() and dist.get_rank():
            return nullcontext()
        return shown_when_slow("capturing the iteration")

    def _capture_follows(self, recording: Recording, num_more: int = 0) -> bool:
        """Tell whether so many warm-ups from now the next call with such a batch captures.

        Each kind of batch has one warm-up at least, unless none are wanted.
        """
        num_wanted = self._options.warmup_steps
        is_warm = self._num_warm_ups + num_more >= num_wanted
        return is_warm and recording.num_eager + num_more >= min(num_wanted, 1)

    def _replay(self, recording: Recording, graph: Graph) -> list[Tensor]:
        if self._ranks.is_collective:
            self._ranks.note_replay()
        self._engine.before_replay(recording)
        verifies = recording.num_verified < self._options.verify
        started = time.perf_counter()
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
        self._tally.add_replay(started, self._backend.name)
        self._engine.after_replay()
        return results

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
            self._go_to(Phase.BROKEN)

    def _go_to(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = self.phase.to(phase)
