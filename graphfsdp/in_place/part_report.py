"""What of a loop is captured, in words."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PartLine:
    """One part.

    Attributes:
        name: Where it is in what ``capture_in_place`` was given.
        kind: Its class.
        state: What its calls do.
        why: Why it is not captured; "" where it is.
        num_nodes: Nodes of its forward graphs.
        num_replays: Calls that were replays.
    """

    name: str
    kind: str
    state: str
    why: str = ""
    num_nodes: int = 0
    num_replays: int = 0


@dataclass(frozen=True)
class PartsReport:
    """All parts of a loop; ``str(report)`` is for people."""

    parts: tuple[PartLine, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(part.name) for part in self.parts) if self.parts else 0
        lines = []
        for part in self.parts:
            text = f"{part.name:<{width}}  {part.kind}: {part.state}"
            if part.num_replays:
                text += f", {part.num_nodes} nodes, {part.num_replays} replays"
            lines.append(f"{text}. {part.why}".rstrip(". "))
        lines.append("everything else runs as written; graphfsdp.capture has one graph for all")
        return "\n".join(lines)
