"""What a capture does, but that it notes every hazard, by the rules of the device that is aimed at.

Note [A capture that is noted]: a check is a capture: the same settings are refused, the same
warm-ups run, and what follows them is recorded by a backend that watches and keeps no graph. What
would be refused is put into a list, and the iteration goes on.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.backend import (
    Check,
    Effect,
    Graph,
    GraphBackend,
    GraphFacts,
    Iterate,
    MemoryUndo,
)
from graphfsdp._capture.trace.source import user_line_of
from graphfsdp._capture.trace.values import StorageInfo, dropped_tensors
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog
from graphfsdp.base.op_tensors import OpCall, as_written, flat_tensors
from graphfsdp.errors import (
    CaptureError,
    ConfigError,
    GraphFSDPError,
    InvalidLossError,
    PhaseError,
    PrecisionError,
    first_line,
    split_remedy,
)
from graphfsdp.preflight.host_tensors import HostTensors

_NEVER_REPLAYED = "an iteration that check has judged is no graph. Remedy: graphfsdp.capture"
# Of what follows a read of the device, that is another number in each run.
_READS = frozenset({HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE, HazardKind.GENERATOR})
# What Python has moved is behind these: where its number went is told already.
_MOVED = frozenset({HazardKind.BAKED_NUMBER, HazardKind.CONTROL_FLOW})


class Findings:
    """The hazards of a check, and who notes them."""

    def __init__(self) -> None:
        self.hazards = HazardLog()

    @contextmanager
    def noting(self, kind: HazardKind) -> Iterator[None]:
        """Note a setting that the body refuses."""
        try:
            yield
        except ConfigError as error:
            of = HazardKind.PRECISION if isinstance(error, PrecisionError) else kind
            self.hazards.add(Hazard(of, *split_remedy(str(error))))

    def refuse(self, error: CaptureError) -> None:
        """Note what a capture finds behind its iteration, unless what is told may be why."""
        hazard, kinds = error.hazard, {each.kind for each in self.hazards}
        compares = hazard.op is not None  # an operator of one run with that of another
        is_state = compares and hazard.kind is HazardKind.STATE
        moves = hazard.kind is HazardKind.BAKED_NUMBER and not compares
        if not (
            (compares and kinds & _READS) or (moves and kinds & _MOVED) or (is_state and kinds)
        ):
            self.hazards.add(hazard)

    def fail(self, error: Exception) -> None:
        """Note what has ended the iteration."""
        self.hazards.add(_hazard_of(error))


def _hazard_of(error: Exception) -> Hazard:
    if isinstance(error, CaptureError):
        return error.hazard
    if isinstance(error, InvalidLossError):
        return Hazard(HazardKind.LOSS, *split_remedy(error.message), source=error.source)
    source = user_line_of(error)
    if isinstance(error, GraphFSDPError):
        return Hazard(HazardKind.CONFIG, *split_remedy(str(error)), source=source)
    return Hazard(
        HazardKind.EXCEPTION,
        f"the iteration raises {first_line(error)}",
        "make the iteration run as it is first; what follows this line was not checked",
        op=type(error).__name__,
        source=source,
    )


class NotingWatcher(Watcher):
    """Notes what it would refuse.

    ``for_cuda``: also what only a GPU would refuse.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, hazards: HazardLog, *, for_cuda: bool
    ) -> None:
        super().__init__(model, device, hazards=hazards)
        self._for_cuda = for_cuda
        self._on_host: HostTensors | None = None
        if for_cuda and device.type == "cpu":
            self._on_host = HostTensors(self.storages)

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a read of a tensor on the host is one that a capture does not permit."""
        if self._on_host is not None and not self._on_host.holds(tensor):
            return True
        return super().varies(tensor)

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Note a refusal, unless the rule is not one of the device that is aimed at."""
        # The kernels of a compiled region are recorded on CUDA like any others.
        if refusal.kind is not HazardKind.COMPILED or not self._for_cuda:
            super().refuse(op, refusal)

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._on_host is None or self.num_quiet:
            return super().on_function(function, args, kwargs)
        judged = self._on_host.judge_function(function, args, kwargs)
        if judged is not None:
            self.refuse(*judged)
        result = super().on_function(function, args, kwargs)
        self._on_host.note_function(function, args, kwargs, result)
        return result

    def judge_op(self, call: OpCall) -> Refusal | None:
        found = super().judge_op(call)
        if found is None and self._on_host is not None:
            found = self._on_host.judge_op(call, super().varies)
        return found

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        if self._on_host is not None:
            self._on_host.note_op(call, flat_tensors([result]))


class Judge:
    """A backend of another one's device, which judges instead of recording."""

    def __init__(self, backend: GraphBackend, findings: Findings, *, for_cuda: bool) -> None:
        self.name = backend.name
        self.device = backend.device
        self.num_ops = 0  # of the iteration that was judged; 0 before that
        self._backend = backend
        self.findings = findings
        self._for_cuda = for_cuda

    def on_capture_stream(self) -> AbstractContextManager[list[Tensor]]:
        return self._backend.on_capture_stream()

    def give_back_memory(self, *, workspaces: bool = True) -> None:
        self._backend.give_back_memory(workspaces=workspaces)

    def begin_undo(self, state: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> MemoryUndo:
        return self._backend.begin_undo(state, scratch)

    def record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
    ) -> tuple[Graph, list[Tensor]]:
        hazards = self.findings.hazards
        watcher = NotingWatcher(model, self.device, hazards, for_cuda=self._for_cuda)
        try:
            # A dispatch mode would not see into compiled regions.
            with as_written(), self.on_capture_stream(), watcher.watching():
                watcher.follow_streams()
                results = iterate()
                watcher.refuse_loose_streams()
        finally:
            self.num_ops = watcher.num_ops
        results = [result.clone() for result in results]
        gc.collect()  # what only a cycle holds is not held
        for dropped in dropped_tensors(watcher.storages):
            hazards.add(dropped.hazard)
        check(watcher.has_touched)
        return _NoGraph(watcher.num_ops), results


class _NoGraph:
    """What was judged, and is never replayed."""

    effect = Effect.NONE

    def __init__(self, num_ops: int) -> None:
        self.facts = GraphFacts(None, num_ops)

    def replay(self) -> list[Tensor]:
        raise PhaseError(_NEVER_REPLAYED)

    def compile(self) -> None: ...

    def close(self) -> None: ...
