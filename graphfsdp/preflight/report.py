"""What a check has found: a table for people, JSON for machines, an error for scripts."""

import io
import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphfsdp.base.hazards import Hazard
from graphfsdp.errors import CaptureError
from graphfsdp.in_place.part_report import PartsReport

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_PLAIN_WIDTH = 120


@dataclass(frozen=True)
class CheckReport:
    """The hazards of one iteration.

    Attributes:
        hazards: What a graph cannot hold, in the order in which it was met: settings first.
        device: Where the iteration ran.
        target: The kind of device whose rules it was judged by.
        num_ops: Operators that the iteration ran; 0 if it could not run.
        num_ignored: Hazards that were left out because their kind was to be ignored.
        advice: The lines that a script needs to be captured, and what each of them captures.
        parts: What ``capture_in_place`` captures of a script's loop; None where that was not tried.
        launches: Where a script's iteration calls operators, and how many.
    """

    hazards: tuple[Hazard, ...]
    device: str
    target: str
    num_ops: int = 0
    num_ignored: int = 0
    advice: str = ""
    parts: PartsReport | None = None
    launches: tuple[tuple[str, int], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.hazards

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
            "advice": self.advice,
            "parts": None if self.parts is None else self.parts.to_json()["parts"],
            "launches": [{"place": place, "count": count} for place, count in self.launches],
            "hazards": [dict(hazard.to_json()) for hazard in self.hazards],
        }

    def to_json_text(self) -> str:
        """Return the same as text."""
        return json.dumps(self.to_json(), indent=2)

    @property
    def headline(self) -> str:
        """The result as one sentence."""
        ignored = f"; {self.num_ignored} ignored" if self.num_ignored else ""
        rules = f"judged by the rules of {self.target}"
        if self.ok:
            return f"can be captured: {self.num_ops} operators on {self.device}, {rules}{ignored}"
        count = f"{len(self.hazards)} hazard{'s' if len(self.hazards) > 1 else ''}"
        return f"cannot be captured: {count} in an iteration on {self.device}, {rules}{ignored}"

    def __str__(self) -> str:
        """Return the table without colours, as wide as the terminal if there is one."""
        from rich.console import Console

        width = shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns
        if not sys.stdout.isatty():
            width = _PLAIN_WIDTH
        text = io.StringIO()
        Console(file=text, width=width, no_color=True, highlight=False).print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Draw the headline and a table with one row for each hazard."""
        from rich.text import Text

        yield Text(self.headline, style="bold green" if self.ok else "bold red")
        if not self.ok:
            yield self._table(console)
        if self.advice:
            yield Text(self.advice if self.ok else f"and then\n{self.advice}")

    def _table(self, console: "Console") -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        plain = not console.is_terminal
        table = Table(box=box.ASCII if plain else box.ROUNDED, show_lines=True, pad_edge=False)
        table.add_column("hazard", style="bold", no_wrap=True)
        table.add_column("where", overflow="fold", ratio=2)
        table.add_column("why, and what to do", overflow="fold", ratio=3)
        for hazard in self.hazards:
            table.add_row(Text(_what(hazard)), Text(_where(hazard)), Text(_why(hazard)))
        return table


def _what(hazard: Hazard) -> str:
    lines = [hazard.kind.value]
    if hazard.count > 1:
        lines.append(f"{hazard.count} times")
    if hazard.cuda_error is not None:
        lines.append(f"CUDA error {hazard.cuda_error}")
    return "\n".join(lines)


def _where(hazard: Hazard) -> str:
    lines = []
    if hazard.source is not None:
        lines += [f"{_short(hazard.source.file)}:{hazard.source.line}", f"  {hazard.source.text}"]
    if hazard.module_path is not None:
        lines.append(f"module {hazard.module_path or '(root)'}")
    if hazard.op is not None:
        lines.append(hazard.op)
    return "\n".join(lines)


def _short(file: str) -> str:
    """Return a path as it is seen from here, if it lies below."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


def _why(hazard: Hazard) -> str:
    why = hazard.why[:1].upper() + hazard.why[1:] if hazard.op is None else hazard.why
    return f"{why}.\nFix: {hazard.fix}" if hazard.fix else why
