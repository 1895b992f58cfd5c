"""Exceptions of graphfsdp: each says what is wrong, expected, got, and the remedy."""

from dataclasses import dataclass


class GraphFSDPError(Exception):
    """Base of every exception that graphfsdp raises on purpose."""


class ConfigError(GraphFSDPError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class PrecisionError(ConfigError):
    """The optimizer would read a casted copy of a gradient, not the persistent buffer."""


class BatchMismatchError(GraphFSDPError, ValueError):
    """A batch differs from the one the graph was made for; the message names the leaf."""


class GuardError(GraphFSDPError, RuntimeError):
    """Something that the graph has baked in was changed between two replays."""


class PhaseError(GraphFSDPError, RuntimeError):
    """A call that the present phase of a captured step does not allow."""


class InvalidLossError(GraphFSDPError, ValueError):
    """``loss_fn`` returned something that cannot be trained on."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class CaptureError(GraphFSDPError):
    """The iteration does something that a graph cannot hold.

    Not a RuntimeError on purpose: a model that catches RuntimeError around a forward pass must
    not swallow it.

    Attributes:
        op: Name of the operation that was refused, such as ``aten._local_scalar_dense``.
        module_path: Full name of the module that was running, "" for the root, None if none was.
        source: The user's line that asked for the operation, None if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        module_path: str | None = None,
        source: SourceLine | None = None,
    ) -> None:
        details = []
        if op is not None:
            details.append(f"  op:     {op}")
        if module_path is not None:
            details.append(f"  module: {module_path or '(root module)'}")
        if source is not None:
            details.append(f"  source: {source}")
        super().__init__("\n".join([message, *details]))
        self.op = op
        self.module_path = module_path
        self.source = source


__all__ = [
    "BatchMismatchError",
    "CaptureError",
    "ConfigError",
    "GraphFSDPError",
    "GuardError",
    "InvalidLossError",
    "PhaseError",
    "PrecisionError",
    "SourceLine",
]
