"""The report of a captured step, gathered from its parts."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.recording import Recordings
from graphfsdp._capture.report.report import CaptureReport
from graphfsdp._capture.report.tables import MemoryNames
from graphfsdp._capture.trace.backend import Graph, GraphFacts
from graphfsdp._capture.trace.program_facts import Role

_LOG = logging.getLogger("graphfsdp")


@dataclass
class Tally:
    """What a step has done so far.

    Attributes:
        num_captures: Successful captures.
        capture_ms: Milliseconds of the last one.
        warmup_ms: Milliseconds of all warm-ups.
        facts: What it turned out to be, also when its graph is gone.
    """

    num_calls: Counter[str] = field(default_factory=Counter)
    num_captures: int = 0
    capture_ms: float | None = None
    warmup_ms: float = 0.0
    facts: GraphFacts | None = None

    def add(self, graph: Graph | None, took_ms: float) -> None:
        """Count a capture, or a warm-up (no graph), that has succeeded."""
        if graph is None:
            self.num_calls["warmup"] += 1
            self.warmup_ms += took_ms
            return
        self.facts, self.capture_ms = graph.facts, took_ms
        self.num_captures += 1
        self.num_calls["capture"] += 1
        _LOG.info("captured %s nodes", graph.facts.num_nodes)


def make_report(
    engine: Engine,
    recordings: Recordings,
    tally: Tally,
    *,
    scope: str,
    phase: str,
) -> CaptureReport:
    """Report on the graph that was used last."""
    facts, num_calls = tally.facts or GraphFacts(None, None), dict(tally.num_calls)
    latest = recordings.latest
    if latest is not None and latest.graph is not None:
        facts = latest.graph.facts
    inputs = None if latest is None else latest.inputs
    started = bool(sum(num_calls.values()))
    return CaptureReport(
        backend=engine.backend.name,
        scope=scope,
        phase=phase,
        num_calls=num_calls,
        num_captures=tally.num_captures,
        num_nodes=facts.num_nodes,
        num_ops=facts.num_ops,
        op_counts=facts.op_counts,
        capture_ms=tally.capture_ms,
        warmup_ms=tally.warmup_ms,
        static_input_bytes=sum(entry.inputs.num_bytes for entry in recordings),
        gradient_bytes=engine.gradients.num_bytes,
        pool_bytes=facts.pool_bytes,
        num_escapes=facts.num_escapes,
        inputs={} if inputs is None else inputs.describe(),
        without_gradient=tuple(engine.gradients.without_gradient()) if started else (),
        compiled=facts.compiled,
        program=facts.program,
        names=MemoryNames(_named_tensors(engine, inputs)),
    )


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
