"""Audits: now and then an iteration runs as written, and is compared with the recorded one."""

import os
from contextlib import AbstractContextManager

from torch import Tensor

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.recording import Recording, Results
from graphfsdp._capture.rules.constants import ConstantLog, noting_constants
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.streams import nvtx_range
from graphfsdp.errors import CaptureError, ConfigError

_VARIABLE = "GRAPHFSDP_AUDIT"
_FARTHEST = 1_024  # replays between two audits


class Auditor:
    """Runs audits.

    Attributes:
        every: "auto", or after how many replays; 0 for never.

    Note [Audits]: guards ask for what code was seen to read. What Python decides by ways that
    nobody sees (a file, a network, memory that C shares) would otherwise train something else for
    ever. So after 1, 2, 4, ... 1,024 replays, and then after each 1,024, the iteration runs as
    written instead of being replayed, which trains with the same bits, and its operators, their
    constants and the memory that they read must be those of the recording. A silent difference
    then lives for a bounded number of iterations. On a GPU the iteration is captured again, into
    the same pool, which runs nothing, and what was captured is launched once.
    """

    def __init__(self, engine: Engine, every: int | str, *, collective: bool) -> None:
        """``every``: "auto", or after how many replays; 0 for never."""
        self._engine = engine
        self.every = _chosen(every)
        self._is_collective = collective

    def is_due(self, recording: Recording) -> bool:
        """Tell whether the next call with such a batch is audited: of like batches on all ranks."""
        done = recording.num_replays
        if not self.every or not done or recording.log is None:
            return False
        if self.every != "auto":
            is_turn = done % int(self.every) == 0
        else:
            is_turn = done % _FARTHEST == 0 or (done < _FARTHEST and done & (done - 1) == 0)
        # Another step over the same parameters has gradients of its own made in eager mode, too.
        return is_turn and recording.num_hooks == self._engine.gradients.num_hooks()

    def run(self, recording: Recording) -> tuple[Results, list[Tensor], str]:
        """Iterate as written, which trains.

        Returns the form of the results, the results, and in words how it is another iteration than
        the recorded one, "" if it is not. Each rank judges by itself: collectives
        are those of a replay, whatever others do.
        """
        inputs, log = recording.inputs, ConstantLog()
        backend = self._engine.backend
        self._engine.go_by(recording.orders)
        with nvtx_range("audit"), self._engine.gradients.shown():
            if backend.device.type == "cpu":
                backend.give_back_memory()  # activations are in the heap now, or in replays' memory
                with as_written():
                    results, form = self._engine.iterate(inputs, self._noting(log))
                backend.give_back_memory()
            else:
                results, form, log = self._record(inputs)
        found = self._difference(recording, log) or self._moves(recording)
        recording.num_audited = recording.num_replays
        recording.num_replays += 1
        return form, results, found

    def _record(self, inputs: StaticInputs) -> tuple[list[Tensor], Results, ConstantLog]:
        engine = self._engine
        last: list[tuple[Results, ConstantLog]] = []  # of the last attempt to record
        engine.before_capture()

        def iterate() -> list[Tensor]:
            log = ConstantLog()
            tensors, form = engine.iterate(inputs, self._noting(log))
            last[:] = [(form, log)]
            return tensors

        graph, results = engine.backend.record(
            iterate,
            engine.model,
            lambda was_read: None,
            collective=self._is_collective,
            scratch=[*inputs.tensors(), *engine.gradients.storages()],
        )
        results = [result.clone() for result in results]
        graph.close()
        return results, *last[0]

    def _noting(self, log: ConstantLog) -> AbstractContextManager[None]:
        return noting_constants(log, self._engine.steps_inside)

    @staticmethod
    def _moves(recording: Recording) -> str:
        """Let go of what only counts or logs now and then; say what else has moved."""
        assert recording.guards is not None
        try:
            recording.guards.let_go_of_moves()
        except CaptureError as error:
            return str(error)
        return ""

    @staticmethod
    def _difference(recording: Recording, log: ConstantLog) -> str:
        assert recording.log is not None
        found = next(recording.log.differences(log), None)
        if found is None:
            return ""
        hazard = found.hazard
        module = "" if hazard.module_path is None else f" in module {hazard.module_path!r}"
        source = "" if hazard.source is None else f" ({hazard.source})"
        return (
            f"an audit after {recording.num_replays} replays has found that the iteration is no "
            f"longer the captured one{module}{source}: {hazard.why}. It may be so since "
            f"replay {recording.num_audited + 1}; the call that was audited has trained as "
            f"written. Remedy: {hazard.fix}; or capture again"
        )


def _chosen(every: int | str) -> int | str:
    """Return what the environment says where the program says nothing."""
    text = os.environ.get(_VARIABLE, "auto")
    if every != "auto" or text == "auto":
        return every
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {_VARIABLE} must be 'auto' or a number of replays, got "
            f"{text!r}. Remedy: unset it, or 0 for no audits"
        )
    return int(text)
