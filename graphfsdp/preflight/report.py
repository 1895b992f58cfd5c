"""What a check has found: lines for people, JSON for machines, an error for scripts."""

import json
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from graphfsdp.errors import CaptureError, Hazard, HazardKind
from graphfsdp.in_place.parts import PartsReport

_INDENT = "    "
_WIDTH = 96
_IN_PLACE = "In parts, with this before the loop: graphfsdp.capture_in_place(model, optimizer)"
_MOST_PLACES = 10
_LAUNCHED = """\
As written, an iteration launches {:,.1f} operators in the mean; {:,.1f} ({:.0%}) are captured.
By place, with the share of operators and that of their processor time:"""
_ONE_GRAPH = """\
In one graph, from the model's call to optimizer.step(), by these lines; this check then judges each
line of iterate (docs/porting.md; graphfsdp.integrations has the Trainer and Lightning):
    def iterate(model, optimizer, *batch): ...  # forward, loss, backward, clipping, step
    step = graphfsdp.capture(model, optimizer, iteration=iterate)  # before the loop
    loss = step(*batch)  # in the loop"""


class PlaceCost(NamedTuple):
    """A module or a line, its backward pass included, or an optimizer's step."""

    place: str
    num_ops: float  # operators that it launches in an iteration, in the mean
    share: float  # of what all places launch
    time_share: float  # of the processor time of that; Python's is not in it
    is_captured: bool


@dataclass(frozen=True)
class CheckReport:
    """The hazards of one iteration.

    Attributes:
        hazards: What a graph cannot hold, in the order in which it was met: settings first.
        device: Where the iteration ran.
        target: The kind of device whose rules it was judged by.
        num_ops: Operators that the iteration ran; 0 if it could not run.
        num_ignored: Hazards that were left out because their kind was to be ignored.
        parts: What ``capture_in_place`` captures of a script's loop, whose other lines were not
            judged; None where that was not tried.
        costs: What the places of that loop launch as it is written; empty if it has ended early.
    """

    hazards: tuple[Hazard, ...]
    device: str
    target: str
    num_ops: int = 0
    num_ignored: int = 0
    parts: PartsReport | None = None
    costs: tuple[PlaceCost, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.hazards

    def without(self, kinds: Collection[HazardKind]) -> "CheckReport":
        """Return it without hazards of some kinds, which are counted."""
        kept = tuple(hazard for hazard in self.hazards if hazard.kind not in kinds)
        return replace(self, hazards=kept, num_ignored=len(self.hazards) - len(kept))

    def raise_if_any(self) -> None:
        """Do nothing if the iteration can be captured.

        Raises:
            CaptureError: it cannot. It has the place and the kind of the first hazard, and names
                all of them.
        """
        if self.ok:
            return
        first = self.hazards[0]
        raise CaptureError(
            str(self),
            op=first.op,
            module_path=first.module_path,
            source=first.source,
            kind=first.kind,
            cuda_error=first.cuda_error,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dictionaries."""
        return {
            "ok": self.ok,
            "device": self.device,
            "target": self.target,
            "num_ops": self.num_ops,
            "num_ignored": self.num_ignored,
            "parts": None if self.parts is None else self.parts.to_json()["parts"],
            "costs": [cost._asdict() for cost in self.costs],
            "hazards": [dict(hazard.to_json()) for hazard in self.hazards],
        }

    def to_json_text(self) -> str:
        """Return the same as text."""
        return json.dumps(self.to_json(), indent=2)

    @property
    def headline(self) -> str:
        """The result as one sentence."""
        ignored = f"; {self.num_ignored} ignored" if self.num_ignored else ""
        rules = f"on {self.device}, judged by the rules of {self.target}{ignored}"
        count = f"{len(self.hazards) or 'no'} hazard{'' if len(self.hazards) == 1 else 's'}"
        if self.parts is not None:
            return f"{count} in what the modules compute on {self.device}{ignored}"
        if self.ok:
            return f"can be captured: {self.num_ops} operators {rules}"
        return f"cannot be captured: {count} in an iteration {rules}"

    def __str__(self) -> str:
        """Return the headline, each hazard with its place, reason and remedy, and what to do."""
        paragraphs = [self.headline, *map(_lines_of, self.hazards)]
        if self.parts is not None:
            lines = [
                textwrap.fill(line, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT * 2)
                for line in str(self.parts).splitlines()
            ]
            paragraphs.append("\n".join([_IN_PLACE, *lines]))
            if self.costs:
                paragraphs.append(_table_of(self.costs))
            paragraphs.append(_ONE_GRAPH)
        return "\n\n".join(paragraphs)


def _table_of(costs: Sequence[PlaceCost]) -> str:
    """Return what is captured of a loop, and its places, those that launch most first."""
    captured = [cost for cost in costs if cost.is_captured]
    share = sum(cost.share for cost in captured)
    num_ops = sum(cost.num_ops for cost in costs)
    lines = [_LAUNCHED.format(num_ops, share * num_ops, share)]
    for cost in costs[:_MOST_PLACES]:
        shares = f"{cost.num_ops:7,.1f} {cost.share:4.0%} {cost.time_share:4.0%}"
        line = f"{_INDENT}{shares}  {cost.place}{': captured' * cost.is_captured}"
        lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ...")
    if len(costs) > _MOST_PLACES:
        lines.append(f"{_INDENT}and {len(costs) - _MOST_PLACES} more, which launch less")
    return "\n".join(lines)


def _lines_of(hazard: Hazard) -> str:
    """Return what it is, where, why, and what to do."""
    what = [hazard.kind.value]
    if hazard.count > 1:
        what.append(f"{hazard.count} times")
    if hazard.cuda_error is not None:
        what.append(f"CUDA error {hazard.cuda_error}")
    lines = [", ".join(what)]
    if hazard.source is not None:
        lines.append(hazard.source.shown)
    if hazard.module_path is not None:
        lines.append(f"in module {hazard.module_path or '(root)'}")
    if hazard.op is not None and not hazard.why.startswith(hazard.op):
        lines.append(hazard.op)
    why = hazard.why[:1].upper() + hazard.why[1:] if hazard.op is None else hazard.why
    for text in (f"{why}.", f"Fix: {hazard.fix}" if hazard.fix else ""):
        lines += textwrap.wrap(text, _WIDTH, break_long_words=False)
    return f"\n{_INDENT}".join(lines)
