"""The report of a captured step, gathered from its parts."""

from collections.abc import Mapping

from graphfsdp._capture.backend import GraphFacts
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.memory_names import memory_names
from graphfsdp._capture.recording import Recordings
from graphfsdp._capture.report import CaptureReport


def make_report(
    engine: Engine,
    recordings: Recordings,
    facts: GraphFacts | None,
    *,
    scope: str,
    phase: str,
    num_calls: Mapping[str, int],
    num_captures: int,
    capture_ms: float | None,
    node_us: tuple[float, ...],
) -> CaptureReport:
    """Return the facts of a captured step.

    Args:
        engine: The training program.
        recordings: Its graphs; the report is about the one that was used last.
        facts: What the last capture turned out to be, also when its graph is gone.
        scope: How much is in a graph.
        phase: What the next call does.
        num_calls: Calls by what they did.
        num_captures: Successful captures.
        capture_ms: Milliseconds of the last one.
        node_us: Microseconds by node, if they were measured.
    """
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
        num_captures=num_captures,
        num_nodes=None if facts is None else facts.num_nodes,
        num_ops=None if facts is None else facts.num_ops,
        op_counts={} if facts is None else facts.op_counts,
        capture_ms=capture_ms,
        static_input_bytes=sum(entry.inputs.num_bytes for entry in recordings),
        gradient_bytes=engine.gradients.num_bytes,
        pool_bytes=0 if facts is None else facts.pool_bytes,
        num_escapes=0 if facts is None else facts.num_escapes,
        inputs={} if inputs is None else inputs.describe(),
        without_gradient=tuple(engine.gradients.without_gradient()) if started else (),
        node_us=node_us,
        program=None if facts is None else facts.program,
        names=memory_names(engine.model, engine.optimizer, engine.gradients, inputs),
    )


__all__ = ["make_report"]
