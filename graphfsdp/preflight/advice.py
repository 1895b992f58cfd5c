"""What a script is told to do: the lines to add, and what each way would leave as it is."""

import sys
import textwrap
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor

from graphfsdp._capture.trace.source import OpPhase, Site, frames, is_users_file
from graphfsdp.base.hazards import SourceLine
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.in_place.module_part import PartState
from graphfsdp.in_place.part_report import PartLine, PartsReport

_INDENT = " " * 18
_WIDTH = 100
_MOST_PLACES = 8


@dataclass(frozen=True)
class Integration:
    """A library's training loop, which has a way of its own to be captured."""

    module: str  # of its loop
    name: str
    folders: tuple[str, ...]  # whose reads are none of the script's
    line: str

    def holds(self, source: SourceLine | None) -> bool:
        return source is not None and any(folder in source.file for folder in self.folders)


_INTEGRATIONS = (
    Integration(
        "transformers.trainer",
        "Trainer",
        ("/transformers/trainer", "/accelerate/"),
        "from graphfsdp.integrations.transformers import CapturedTrainer as Trainer",
    ),
    *(
        Integration(
            f"{package}.trainer.trainer",
            "Trainer",
            (f"/{package.replace('.', '/')}/", "/lightning_fabric/", "/lightning/fabric/"),
            "from graphfsdp.integrations.lightning import CapturedTraining; "
            "Trainer(..., callbacks=[CapturedTraining()])",
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)


def integration_of() -> Integration | None:
    """Return the one for the loop that runs now."""
    for each in _INTEGRATIONS:
        kind: Any = getattr(sys.modules.get(each.module), each.name, None)
        for frame in frames() if kind is not None else ():
            owner = frame.f_locals.get("self")
            if isinstance(owner, kind):
                between = type(owner).__mro__[: type(owner).__mro__.index(kind)]
                # Another library's trainer, which the integration would not call.
                is_other = any("training_step" in vars(base) for base in between)
                return None if is_other else each
    return None


@dataclass(frozen=True)
class Advice:
    """What is known of the loop, by the names that the script has where it steps.

    Attributes:
        models: Their names, as those of optimizers.
        step: The call that ends an iteration.
        names: By what a report of parts calls models and optimizers.
        inputs: Names of what the loop hands to a graph of it.
        beside: Where it reads what is none of the graph's between the two ends.
        launches: How many operators each place calls.
    """

    models: Sequence[str]
    optimizers: Sequence[str]
    step: str
    names: Mapping[str, str]
    begins: SourceLine | None
    ends: SourceLine | None
    inputs: Sequence[str]
    launches: Sequence[tuple[Site, int]]
    has_other_shapes: bool
    is_theirs: bool
    integration: Integration | None
    beside: Sequence[SourceLine]

    def places(self) -> list[tuple[str, int]]:
        """Return where operators are called, and how many, in the order of the program."""
        found: dict[str, int] = {}
        for site, count in self.launches:
            if site.phase is OpPhase.BACKWARD:
                place = "backward passes"
            elif site.module is not None and not site.module.startswith("<"):
                place = "forward passes"
            else:
                place = (
                    "elsewhere"
                    if site.source is None
                    else f"{_place(site.source)} {_text(site.source)}"
                )
            found[place] = found.get(place, 0) + count
        return list(found.items())

    def text(self, parts: PartsReport | None) -> str:
        """Return the lines; ``parts``: what ``capture_in_place`` has made of the loop."""
        if self.integration is not None:
            return f"instead:          {self.integration.line}"
        given = f"{_list_of(self.models)}, {_list_of(self.optimizers)}"
        lines = []
        if not self.is_theirs:
            lines.append(f"before the loop:  graphfsdp.capture_in_place({given})")
        if parts is not None:
            lines.append(_paragraph("which captures:", map(self._line, parts.parts)))
        places = [f"{place}: {_operators(count)}" for place, count in self.places()]
        if len(places) > _MOST_PLACES:
            left = sum(count for _, count in self.places()[_MOST_PLACES:])
            places = [*places[:_MOST_PLACES], f"and elsewhere: {_operators(left)}"]
        lines.append(_paragraph("an iteration:", places))
        inputs = ", ".join(self.inputs) or "*batch"
        params = ", ".join(name.rpartition(".")[2] for name in self.inputs) or "*batch"
        where = f"{_place(self.begins)} to {_place(self.ends)}"
        lines.append(
            f"one graph of it:  step = graphfsdp.capture({given}, iteration=iterate), and in the "
            f"loop\n{_INDENT}step({inputs}) in place of {where}, which become\n"
            f"{_INDENT}def iterate(model, optimizer, {params})"
        )
        if self.beside:
            places = [f"{_place(source)} {_text(source)}" for source in self.beside]
            lines.append(_paragraph("but in the loop:", places))
        if self.has_other_shapes:
            lines.append(
                "other shapes:     an iteration has others than the one before: a graph for each, "
                "with\n"
                f"{_INDENT}graphfsdp.capture(..., on_change='recapture')"
            )
        return "\n".join(lines)

    def _line(self, part: PartLine) -> str:
        root, dot, path = part.name.partition(".")
        name = f"{self.names.get(root, root)}{dot}{path} ({part.kind})"
        if part.state == PartState.WARMUP.value:
            return (
                f"{name}: as written: it is called too seldom, or with what no part takes "
                "(an expanded or a complex tensor, an object)"
            )
        nodes = f", {part.num_nodes} nodes" if part.num_nodes else ""
        return f"{name}: {part.state}{nodes}{part.why and f': {part.why}'}"


def _paragraph(title: str, items: Iterable[str]) -> str:
    """Return a title, and beside it items, each on lines of its own."""
    lines = [line for item in items for line in textwrap.wrap(item, _WIDTH, subsequent_indent="  ")]
    return f"{title:<18}" + f"\n{_INDENT}".join(lines)


def _operators(count: int) -> str:
    return f"{count} operator{'s' if count > 1 else ''}"


def _place(source: SourceLine | None) -> str:
    return "?" if source is None else f"{source.file.rpartition('/')[2]}:{source.line}"


def _list_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _text(source: SourceLine) -> str:
    return source.text if len(source.text) <= 60 else f"{source.text[:57]}..."


def _items_of(value: object) -> Iterable[object]:
    """Return what a batch holds."""
    if isinstance(value, dict | UserDict):
        return list(value.values())
    return vars(value).values() if is_dataclass(value) and not isinstance(value, type) else ()


def names_of(*values: object, fallback: str) -> list[str]:
    """Return what the script calls these where it is now."""
    frame = next((f for f in frames() if is_users_file(f.f_code.co_filename)), None)
    scope: dict[str, object] = {}
    if frame is not None:
        owner = getattr(frame.f_locals.get("self"), "__dict__", {})
        of_owner = {f"self.{name}": value for name, value in owner.items()}
        scope = {**of_owner, **frame.f_globals, **frame.f_locals}
    wanted = set(map(id, values))
    for name, value in scope.items():
        if isinstance(value, list | tuple) and len(values) > 1 and set(map(id, value)) == wanted:
            return [name]
    holding = {
        id(item): name
        for name, value in scope.items()
        for item in _items_of(value)
        if id(item) in wanted
    }
    tensors = {name: value for name, value in scope.items() if isinstance(value, Tensor)}
    memory = {storage_key(value): name for name, value in tensors.items() if storage_key(value)}
    views = {
        id(value): memory[storage_key(value)]
        for value in values
        if isinstance(value, Tensor) and storage_key(value) in memory
    }
    known = views | holding | {id(value): name for name, value in scope.items()}
    return list(dict.fromkeys(known.get(id(value), fallback) for value in values))
